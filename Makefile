# make demo         a guest with half of its RAM on a memory server, shown while it runs
# make test         everything that is tested, ending in 'N passed, N failed, N skipped'
# make soak         the simulation and the killing of backends for hours (tests/README.md)
# make bench        what paging costs beside floors and baselines: a table, and plots in target/bench
# make bench-quick  the same in small, some minutes (BENCH='--only quicksort' has arguments of either)
# make bench-guests real programs in Debian guests at several local ratios (BENCH='--quick --only redis')
# make man          manual pages and shell completions, to target/manual
# make deb          Debian packages, to target/debian
# make lab          a shell in an emulated machine with KVM whose root is this one's (tests/README.md)
# make fuzz         each fuzz target for FUZZ_SECONDS (60), or one with FUZZ=NAME (tests/README.md)
# make check        formatting, lints, documentation
# make clean-state  removes what interrupted runs may have left behind
#
# All install what they need from the distribution's packages (Debian 12 or newer, as root) and use what
# is there. PROFILE=release or dev chooses how the demo's programs are built.

export PATH := $(PATH):/usr/sbin:/sbin
# What cargo tells a program of its package, where that calls us (the packages' test): ring, whose build looks at
# it, would be built anew with all that depends on it, and once more by the next cargo that is not told.
unexport $(filter CARGO_PKG_% CARGO_MANIFEST_%,$(.VARIABLES))

.PHONY: all build demo test soak bench bench-quick bench-guests man deb lab fuzz check images clean-state

all: build

build:
	@tests/scripts/prepare.sh
	cargo build --workspace --profile $(or $(PROFILE),dev)

demo:
	@tests/scripts/prepare.sh
	@tests/scripts/run-demo.sh

test:
	@tests/scripts/run-tests.sh

soak:
	@tests/scripts/soak.sh

# Release builds, for those are measured.
bench bench-quick:
	@tests/scripts/prepare.sh
	cargo build --workspace --bins --release
	@target/release/bench run $(if $(filter bench-quick,$@),--quick) $(BENCH)

# Not what prepare.sh asks for: mmdebstrap, which the recipe installs where it is missing.
bench-guests:
	@tests/scripts/prepare.sh
	@images/debian/build.sh
	cargo build --workspace --bins --release
	@target/release/bench guests $(BENCH)

man:
	@tests/scripts/prepare.sh
	cargo build --workspace --profile $(or $(PROFILE),dev) --bin outram --bin manual
	target/$(if $(filter release,$(PROFILE)),release,debug)/manual target/manual

# Its version is pinned here, for it is no dependency that Cargo.lock knows. Made in a third of the time
# that a release build takes; what compresses is optimised all the same.
CARGO_DEB := target/tools/bin/cargo-deb

$(CARGO_DEB):
	@tests/scripts/prepare.sh
	CARGO_PROFILE_DEV_DEBUG=0 cargo install cargo-deb --version 3.8.0 --locked --debug --root target/tools

# Release builds unless PROFILE=dev, which tests take: quick to make, large.
deb: PROFILE := $(or $(PROFILE),release)
deb: $(CARGO_DEB)
	@tests/scripts/prepare.sh
	cargo build --workspace --bins --profile $(PROFILE)
	$(MAKE) --no-print-directory man PROFILE=$(PROFILE)
	for package in outram-memserver outram-libvirt; do \
	  $(CARGO_DEB) --quiet --no-build --profile $(PROFILE) $(if $(filter dev,$(PROFILE)),--fast) \
	    --package $$package --output target/debian/ || exit 1; \
	done

# LAB='--memory 2048 -- COMMAND' gives it less memory and runs a command instead.
lab:
	@tests/scripts/prepare.sh
	cargo build --workspace
	@target/debug/lab $(LAB)

CARGO_FUZZ := target/tools/bin/cargo-fuzz

$(CARGO_FUZZ):
	@tests/scripts/prepare.sh
	cargo install cargo-fuzz --version 0.13.1 --locked --root target/tools

# What the fuzzer adds to the seeds stays in target/fuzz; tests/fuzz/seeds changes by hand alone.
fuzz: FUZZ_SECONDS := $(or $(FUZZ_SECONDS),60)
fuzz: $(CARGO_FUZZ)
	@tests/scripts/prepare.sh
	@tests/scripts/run-fuzz.sh $(abspath $(CARGO_FUZZ)) $(FUZZ_SECONDS) $(FUZZ)

check:
	@tests/scripts/prepare.sh --lints
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

images:
	@images/build.sh

clean-state:
	@tests/scripts/clean-state.sh

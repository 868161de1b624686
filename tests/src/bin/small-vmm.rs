//! The small VMM as a program: see `outram_tests::small_vmm`.

use std::process::ExitCode;

use anyhow::Result;
use outram_tests::small_vmm::{Arguments, machine};

fn main() -> Result<ExitCode> {
    machine::run(&Arguments::parse(std::env::args().skip(1))?)
}

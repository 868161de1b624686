#!/bin/bash
# Builds the lab guest with the newest kernel that the distribution offers, backports included, beside
# the one with its own; prints the folder. Once built, it needs no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUTRAM_IMAGES=$PWD/target/images-newest OUTRAM_KERNEL_PACKAGE=newest exec images/lab/build.sh

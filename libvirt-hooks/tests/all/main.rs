//! The commands and the hooks as programs, and the library's public side. One program, for each more is
//! linked anew.

mod attachment;
mod cli;
mod foreign;
mod hook;
mod metadata;
mod mutations;
mod refusals;
mod setup;
mod support;
mod user_edits;

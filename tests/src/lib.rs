//! What Outram's end-to-end tests, fault injection and demo are made of.

pub mod bench;
pub mod hermetic;
pub mod lab_guest;
pub mod small_lab;
pub mod small_vmm;

pub mod split_mix;

//! String instructions between memory and an I/O port. Under KVM the host's kernel carries them out in the
//! guest's stead, and reads and writes the guest's memory by itself.

#![allow(unsafe_code)]

use std::arch::asm;
use std::io;

/// PCI's configuration address register: four bytes wide, and what was written last is read.
const PORT: u16 = 0xcf8;

/// 32-bit words of a page.
const WORDS: usize = 1024;

/// Its bit that says a configuration cycle is meant; each page's words have it, for a kernel's own.
const ENABLED: u32 = 1 << 31;

/// A page that the port is read into, or written from.
#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u32; WORDS]);

/// As many pages to be written from as to be read into.
pub(crate) struct Pages {
    outward: Vec<Page>,
    inward: Vec<Page>,
}

fn word(page: usize) -> u32 {
    ENABLED | (page as u32) << 8
}

impl Pages {
    /// Pages whose words differ from page to page; those of the other half are of ones.
    pub(crate) fn filled(count: usize) -> Self {
        Self {
            outward: (0..count).map(|page| Page([word(page); WORDS])).collect(),
            inward: vec![Page([u32::MAX; WORDS]); count],
        }
    }

    /// How many it are of each half.
    pub(crate) fn len(&self) -> usize {
        self.outward.len()
    }

    /// Writes each page of the one half to the port, and reads a page of the other from it; how many of
    /// these have other words than those had.
    pub(crate) fn pass_through_port(&mut self) -> io::Result<usize> {
        open_ports()?;
        let mut wrong = 0;
        for (number, (from, to)) in self.outward.iter().zip(&mut self.inward).enumerate() {
            write(from);
            read(to);
            wrong += usize::from(to.0.iter().any(|found| *found != word(number)));
        }
        Ok(wrong)
    }
}

fn open_ports() -> io::Result<()> {
    const IOPL: isize = 172;
    const ALL: isize = 3;
    let result: isize;
    // SAFETY: iopl(2) touches no memory; this process is the guest's only one and may use all ports.
    unsafe {
        asm!("syscall", inlateout("rax") IOPL => result, in("rdi") ALL,
            lateout("rcx") _, lateout("r11") _);
    }
    match result {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error as i32)),
    }
}

fn write(page: &Page) {
    // SAFETY: reads WORDS words from `page`, which outlives the instruction; the port is opened, and
    // keeps a word without acting upon it.
    unsafe {
        asm!("cld", "rep outsd", inout("rsi") page.0.as_ptr() => _, inout("rcx") WORDS => _,
            in("dx") PORT);
    }
}

fn read(page: &mut Page) {
    // SAFETY: writes WORDS words to `page`, which is borrowed for that; reading the port changes nothing.
    unsafe {
        asm!("cld", "rep insd", inout("rdi") page.0.as_mut_ptr() => _, inout("rcx") WORDS => _,
            in("dx") PORT);
    }
}

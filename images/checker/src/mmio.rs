//! String instructions between memory and an address at which there is no memory. Under KVM the host's
//! kernel carries them out in the guest's stead, and reads and writes the guest's memory by itself.

#![allow(unsafe_code)]

use std::arch::asm;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;

/// A physical address that no device of QEMU's has: what is written there is gone, and zeros are read.
const NOWHERE: usize = 0xfed5_0000;

/// 32-bit words of a page.
const WORDS: usize = 1024;

/// Another word than those that are read from nowhere.
const MARK: u32 = 0xa5a5_a5a5;

/// A page that is read from nowhere, or written and compared to it.
#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u32; WORDS]);

impl Page {
    /// Zeros but for one mark.
    fn marked(at: usize) -> Self {
        let mut words = [0; WORDS];
        words[at] = MARK;
        Self(words)
    }
}

/// As many pages to be read by the kernel as to be written by it.
pub(crate) struct Pages {
    outward: Vec<Page>,
    inward: Vec<Page>,
}

/// Where the mark of a page is: its number's place in an order that goes through all words.
fn mark_of(page: usize) -> usize {
    (page * 389 + 7) % WORDS
}

impl Pages {
    /// Pages whose marks differ from page to page; those of the other half are full of them.
    pub(crate) fn filled(count: usize) -> Self {
        Self {
            outward: (0..count).map(|page| Page::marked(mark_of(page))).collect(),
            inward: vec![Page([MARK; WORDS]); count],
        }
    }

    /// How many it are of each half.
    pub(crate) fn len(&self) -> usize {
        self.outward.len()
    }

    /// Has each page of the one half compared to what is nowhere, up to its mark, then written there; and a
    /// page of the other read from there. How many pages were not what they had to be.
    pub(crate) fn pass(&mut self) -> io::Result<usize> {
        let nowhere = map_nowhere()?;
        let mut wrong = 0;
        for (number, (from, to)) in self.outward.iter().zip(&mut self.inward).enumerate() {
            let found = first_difference(from, nowhere);
            write(from, nowhere);
            read(nowhere, to);
            let is_right = found == mark_of(number) && to.0.iter().all(|word| *word == 0);
            wrong += usize::from(!is_right);
        }
        Ok(wrong)
    }
}

/// A page of addresses with nothing behind them; it stays mapped.
fn map_nowhere() -> io::Result<*mut u32> {
    const MMAP: isize = 9;
    const READ_AND_WRITE: usize = 3;
    const SHARED: usize = 1;
    let memory = OpenOptions::new().read(true).write(true).open("/dev/mem")?;
    let result: isize;
    // SAFETY: mmap(2) of a new range, of addresses that are neither memory nor a device's.
    unsafe {
        asm!("syscall", inlateout("rax") MMAP => result, in("rdi") 0, in("rsi") WORDS * 4,
            in("rdx") READ_AND_WRITE, in("r10") SHARED, in("r8") memory.as_raw_fd() as isize,
            in("r9") NOWHERE, lateout("rcx") _, lateout("r11") _);
    }
    match result {
        error @ -4095..0 => Err(io::Error::from_raw_os_error(-error as i32)),
        address => Ok(address as *mut u32),
    }
}

/// The first word of a page that is not what is read from nowhere.
fn first_difference(page: &Page, nowhere: *const u32) -> usize {
    let left: usize;
    // SAFETY: reads at most WORDS words from `page`, which outlives the instruction, and from `nowhere`,
    // which stays mapped.
    unsafe {
        asm!("cld", "repe cmpsd", inout("rsi") page.0.as_ptr() => _, inout("rdi") nowhere => _,
            inout("rcx") WORDS => left);
    }
    // The word that differs is counted as well.
    WORDS - left - 1
}

fn write(page: &Page, nowhere: *mut u32) {
    // SAFETY: reads WORDS words from `page`, which outlives the instruction; nothing takes what is written.
    unsafe {
        asm!("cld", "rep movsd", inout("rsi") page.0.as_ptr() => _, inout("rdi") nowhere => _,
            inout("rcx") WORDS => _);
    }
}

fn read(nowhere: *const u32, page: &mut Page) {
    // SAFETY: writes WORDS words to `page`, which is borrowed for that.
    unsafe {
        asm!("cld", "rep movsd", inout("rsi") nowhere => _, inout("rdi") page.0.as_mut_ptr() => _,
            inout("rcx") WORDS => _);
    }
}

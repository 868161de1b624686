//! The driver's side of a virtio-blk queue, sound requests and deliberately broken ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use outram_wire::units::PAGE_SIZE;
use serde_json::{Value, json};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::ram::Ram;

const PAGE: u64 = PAGE_SIZE as u64;
/// Descriptor flags (virtio 1.2, section 2.7.5).
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
const HEADER_BYTES: u64 = 16;
/// How often the used ring is looked at.
const TICK: Duration = Duration::from_micros(200);

/// A queue's rings in guest memory: descriptor table, available and used ring, each from a page's
/// start.
pub(super) struct Rings {
    pub queue: usize,
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
    /// Whether notifications go by event index.
    pub event_idx: bool,
    next_available: u16,
    last_used: u16,
}

/// A descriptor as it is written into the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    pub address: u64,
    pub length: u32,
    pub flags: u16,
    pub next: u16,
}

impl Rings {
    /// Lays a queue's rings out from a page on, and clears them.
    pub(super) fn lay_out(
        ram: &Ram,
        queue: usize,
        (size, event_idx): (u16, bool),
        first_page: u64,
    ) -> Result<Self> {
        ensure!(size.is_power_of_two(), "a queue's size is a power of two");
        let descriptors = first_page * PAGE;
        let available = descriptors + (u64::from(size) * 16).next_multiple_of(PAGE);
        let used = available + (6 + u64::from(size) * 2).next_multiple_of(PAGE);
        let end = used + 6 + u64::from(size) * 8;
        ram.write(descriptors, &vec![0; (end - descriptors) as usize])?;
        Ok(Self {
            queue,
            size,
            descriptors,
            available,
            used,
            kick: EventFd::new(EFD_NONBLOCK)?,
            call: EventFd::new(EFD_NONBLOCK)?,
            error: EventFd::new(EFD_NONBLOCK)?,
            event_idx,
            next_available: 0,
            last_used: 0,
        })
    }

    /// Writes descriptors from index 0 on, offers `head` and waits until the device answers, reports
    /// the queue as broken, or neither within the time: `used` is the answer, null without one.
    pub(super) fn submit(
        &mut self,
        ram: &Ram,
        descriptors: &[Descriptor],
        head: u16,
        wait: Duration,
    ) -> Result<Value> {
        self.describe(ram, 0, descriptors)?;
        self.offer(ram, head)?;
        self.wait_for_used(ram, wait)
    }

    /// Writes descriptors from an index on.
    pub(super) fn describe(&self, ram: &Ram, first: u16, descriptors: &[Descriptor]) -> Result<()> {
        for (index, descriptor) in (u64::from(first)..).zip(descriptors) {
            let mut bytes = descriptor.address.to_le_bytes().to_vec();
            bytes.extend_from_slice(&descriptor.length.to_le_bytes());
            bytes.extend_from_slice(&descriptor.flags.to_le_bytes());
            bytes.extend_from_slice(&descriptor.next.to_le_bytes());
            ram.write(self.descriptors + index * 16, &bytes)?;
        }
        Ok(())
    }

    /// Offers the chain that begins at `head`.
    pub(super) fn offer(&mut self, ram: &Ram, head: u16) -> Result<()> {
        let slot = u64::from(self.next_available % self.size);
        ram.store_u16(self.available + 4 + 2 * slot, head)?;
        self.next_available = self.next_available.wrapping_add(1);
        ram.store_u16(self.available + 2, self.next_available)?;
        self.kick.write(1).context("kicking")
    }

    /// Where a device goes on that knows nothing of the one before it: behind what was answered, as
    /// QEMU tells it.
    pub(super) fn answered(&self, ram: &Ram) -> Result<u16> {
        ram.load_u16(self.used + 2)
    }

    /// The next answer, if there is one: the chain's head and the bytes written.
    pub(super) fn take_used(&mut self, ram: &Ram) -> Result<Option<(u32, u32)>> {
        if self.answered(ram)? == self.last_used {
            return Ok(None);
        }
        let slot = u64::from(self.last_used % self.size);
        let entry = ram.read(self.used + 4 + 8 * slot, 8)?;
        self.last_used = self.last_used.wrapping_add(1);
        let word = |at: usize| {
            let bytes: [u8; 4] = entry[at..at + 4].try_into().expect("eight bytes were read");
            u32::from_le_bytes(bytes)
        };
        Ok(Some((word(0), word(4))))
    }

    /// Claims that many more requests are available than there are: a broken index.
    pub(super) fn overrun(&mut self, ram: &Ram, by: u16) -> Result<()> {
        ram.store_u16(self.available + 2, self.next_available.wrapping_add(by))?;
        Ok(self.kick.write(1)?)
    }

    /// Whether the device reports the queue as broken within the time, or did since last asked.
    pub(super) fn wait_until_broken(&self, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        loop {
            // A report that came while this thread stood still is one, too.
            let is_late = Instant::now() >= deadline;
            if self.is_reported_broken() {
                return true;
            }
            if is_late {
                return false;
            }
            std::thread::sleep(TICK);
        }
    }

    fn is_reported_broken(&self) -> bool {
        self.error.read().is_ok()
    }

    fn wait_for_used(&mut self, ram: &Ram, wait: Duration) -> Result<Value> {
        let deadline = Instant::now() + wait;
        loop {
            let is_late = Instant::now() >= deadline;
            // In this order: an answer before the report is seen with it.
            let is_broken = self.is_reported_broken();
            let answer = self.take_used(ram)?;
            if answer.is_some() || is_broken || is_late {
                let called = self.call.read().is_ok();
                let used = answer.map(|(head, length)| json!({"id": head, "length": length}));
                return Ok(json!({"used": used, "called": called, "broken": is_broken}));
            }
            std::thread::sleep(TICK);
        }
    }
}

/// A sound request: header and status in one page, data in those behind it.
pub(super) struct Request {
    pub kind: u32,
    pub sector: u64,
    pub bytes: u32,
    pub page: u64,
}

impl Request {
    /// Sends it; its status, the length the device reported and the data's first bytes.
    pub(super) fn run(&self, ram: &Ram, rings: &mut Rings, wait: Duration) -> Result<Value> {
        let header = self.page * PAGE;
        let status = header + HEADER_BYTES;
        let data = header + PAGE;
        let mut bytes = u64::from(self.kind).to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.sector.to_le_bytes());
        bytes.push(0xff);
        ram.write(header, &bytes)?;
        let descriptor = |address, length, flags, next| Descriptor {
            address,
            length,
            flags,
            next,
        };
        let descriptors = [
            descriptor(
                header,
                HEADER_BYTES as u32,
                NEXT,
                if self.bytes > 0 { 1 } else { 2 },
            ),
            descriptor(data, self.bytes, NEXT | WRITE, 2),
            descriptor(status, 1, WRITE, 0),
        ];
        let answer = rings.submit(ram, &descriptors, 0, wait)?;
        let shown = ram.read(data, u64::from(self.bytes.min(64)))?;
        Ok(json!({
            "used": answer["used"],
            "called": answer["called"],
            "status": ram.read(status, 1)?[0],
            "data": hex(&shown),
        }))
    }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hexadecimal digits as bytes.
pub(super) fn unhex(text: &str) -> Result<Vec<u8>> {
    ensure!(
        text.is_ascii() && text.len().is_multiple_of(2),
        "hexadecimal digits come in pairs"
    );
    (0..text.len())
        .step_by(2)
        .map(|at| {
            u8::from_str_radix(&text[at..at + 2], 16).context("a hexadecimal digit was expected")
        })
        .collect()
}

/// Rings that a vCPU and the main thread share.
pub(super) type SharedRings = Arc<std::sync::Mutex<Rings>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_goes_there_and_back() {
        assert_eq!(
            unhex(&hex(&[0, 1, 0xfe])).expect("own digits"),
            [0, 1, 0xfe]
        );
        assert!(unhex("abc").is_err());
        assert!(unhex("zz").is_err());
    }
}

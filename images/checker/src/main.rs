//! The program inside the test guest. It obeys commands, first those of the kernel's command line
//! (`outram.do=check:80:20,poweroff`), then those read line by line from the serial console, and
//! answers each with one line. A last command `again` of the kernel's command line has those before
//! it obeyed for ever.
//!
//! | command | answer |
//! |---|---|
//! | `ping TOKEN` | `PONG TOKEN`, with the counters so far |
//! | `alloc SHARE` | `ALLOCATED pages=N`: that many per cent of RAM taken and written |
//! | `alloc all` | the same, of all that the guest's kernel has to give |
//! | `more MIB` | `ALLOCATED pages=N`: that many MiB beside what is taken already |
//! | `work SECONDS` | `WORKED`: read, checked and rewritten at random; with 0 seconds `WORKING`, until `halt` |
//! | `halt` | `HALTED` |
//! | `verify` | `CHECKER pages=… checked=… rewritten=… mismatches=…` |
//! | `check SHARE SECONDS` | all of these, then the memory is freed: `CHECKER …` |
//! | `free` | `FREED` |
//! | `corrupt N`, `stale N` | `BROKEN`: the checker's own test, mismatches must follow |
//! | `disk-read N`, `disk-write`, `disk-id` | `DISK …` |
//! | `arena MIB` | `ALLOCATED pages=N`: so many MiB, which may be more than the guest's RAM |
//! | `swap-on`, `swap` | `SWAP size_kib=… used_kib=…`: the disk made a swap device; how full it is |
//! | `fs-make`, `fs-write FILES VERSION`, `fs-verify FILES VERSION`, `fs-remove FILES` | `FS …` |
//! | `bare-write MIB VERSION`, `bare-verify MIB VERSION`, `bare-clear discard` | `BARE …` |
//! | `mmio-pages N`, `mmio-pass` | `MMIO pages=…`, `MMIO pages=… wrong=…`: pages to and from where no memory is |
//! | `reader MIB`, `reader-end` | `READER pages=N`, `READER signal=N`: another process reads its memory; what ended it |
//! | `net-listen ADDRESS PORT`, `net-check` | `NET packets=… wrong=…`: packets are kept; they are as they were sent |
//! | `meminfo` | `MEMINFO …` |
//! | `poweroff`, `reboot` | the guest ends or starts again |

mod arena;
mod busybox;
mod disk;
mod mmio;
mod network;
mod pattern;
mod reader;
mod volume;

use std::io::{self, BufRead};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arena::{Region, Tally};
use network::Packets;
use pattern::PAGE_BYTES;
use reader::Reader;

/// What `alloc all` leaves: page tables of what it takes, versions of its pages (a thousandth), and
/// what a kernel that is asked for its last page needs to go on.
const RESERVE_BYTES: u64 = 16 << 20;

/// The memory under test: at rest, or with workers in the background.
enum Memory {
    Idle(Vec<Region>),
    Working(Vec<JoinHandle<Region>>),
}

struct Agent {
    memory: Memory,
    tally: Arc<Tally>,
    workers: usize,
    mmio_pages: Option<mmio::Pages>,
    reader: Option<Reader>,
    packets: Option<Packets>,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(reader::ARGUMENT) {
        match number(arguments.next().as_deref(), "MiB") {
            Ok(mib) => reader::read(mib),
            Err(error) => println!("{error}"),
        }
        return;
    }
    let mut agent = Agent {
        memory: Memory::Idle(Vec::new()),
        tally: Arc::new(Tally::default()),
        workers: thread::available_parallelism().map_or(1, usize::from),
        mmio_pages: None,
        reader: None,
        packets: None,
    };
    println!(
        "READY ram_kib={} workers={}",
        ram_bytes().unwrap_or(0) / 1024,
        agent.workers
    );
    let commands = boot_commands();
    let (commands, is_again) = match commands.split_last() {
        Some((last, before)) if last == "again" => (before, true),
        _ => (commands.as_slice(), false),
    };
    loop {
        for command in commands {
            agent.obey(command);
        }
        if !is_again {
            break;
        }
    }
    for line in io::stdin().lock().lines() {
        match line {
            Ok(line) => agent.obey(&line),
            Err(error) => {
                println!("ERROR reading the console: {error}");
                return;
            }
        }
    }
}

/// Commands of the kernel's command line: `outram.do=a:1:2,b` is `a 1 2`, then `b`.
fn boot_commands() -> Vec<String> {
    let cmdline = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    cmdline
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("outram.do="))
        .flat_map(|list| list.split(','))
        .map(|command| command.replace(':', " "))
        .collect()
}

/// The RAM the guest was given, from the kernel's map: what it keeps for itself is part of it.
fn ram_bytes() -> io::Result<u64> {
    let map = std::fs::read_to_string("/proc/iomem")?;
    let bytes = map
        .lines()
        .filter(|line| line.ends_with(": System RAM") && !line.starts_with(' '))
        .filter_map(|line| line.split_once(" : ")?.0.split_once('-'))
        .filter_map(|(first, last)| {
            let first = u64::from_str_radix(first, 16).ok()?;
            let last = u64::from_str_radix(last, 16).ok()?;
            last.checked_sub(first)?.checked_add(1)
        })
        .sum();
    Ok(bytes)
}

fn number(word: Option<&str>, what: &str) -> Result<u64, String> {
    let word = word.ok_or_else(|| format!("{what} is missing"))?;
    word.parse()
        .map_err(|_| format!("{what} '{word}' is not a whole number"))
}

fn two(first: Option<&str>, second: Option<&str>) -> Result<(u64, u64), String> {
    Ok((number(first, "a count")?, number(second, "a version")?))
}

impl Agent {
    fn obey(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let Some(command) = words.next() else { return };
        let first = words.next();
        let answer = match command {
            "ping" => Ok(self.pong(first.unwrap_or("-"))),
            "alloc" if first == Some("all") => self.allocate_all(),
            "alloc" => number(first, "share").and_then(|share| self.allocate(share)),
            "more" => number(first, "MiB").and_then(|mib| self.allocate_more(mib)),
            "work" => number(first, "seconds").map(|seconds| self.work(seconds)),
            "halt" => self.halt().map(|()| "HALTED".to_owned()),
            "verify" => self.verify(),
            "check" => number(first, "share").and_then(|share| {
                let seconds = number(words.next(), "seconds")?;
                self.check(share, seconds)
            }),
            "free" => self.take().map(|regions| {
                drop(regions);
                "FREED".to_owned()
            }),
            "corrupt" => number(first, "pages").and_then(|n| self.damage(n, Region::corrupt)),
            "stale" => number(first, "pages").and_then(|n| self.damage(n, Region::forget_stores)),
            "disk-read" => number(first, "count").and_then(|count| self.read_disk(count)),
            "disk-write" => disk::write()
                .map(|report| format!("DISK {report}"))
                .map_err(|error| error.to_string()),
            "disk-id" => disk::identity()
                .map(|id| format!("DISK id={id}"))
                .map_err(|error| error.to_string()),
            "arena" => {
                number(first, "MiB").and_then(|mib| self.fill((mib << 20) / PAGE_BYTES as u64))
            }
            "swap-on" => volume::swap_on(),
            "swap" => volume::swap_in_use(),
            "fs-make" => volume::make_file_system(),
            "fs-write" => two(first, words.next()).and_then(|(n, v)| volume::write_files(n, v)),
            "fs-verify" => two(first, words.next()).and_then(|(n, v)| volume::verify_files(n, v)),
            "fs-remove" => number(first, "files").and_then(volume::remove_files),
            "bare-write" => two(first, words.next()).and_then(|(n, v)| volume::write_bare(n, v)),
            "bare-verify" => two(first, words.next()).and_then(|(n, v)| volume::verify_bare(n, v)),
            "bare-clear" => volume::clear(first.unwrap_or("")),
            "mmio-pages" => number(first, "pages").map(|pages| self.fill_mmio_pages(pages)),
            "mmio-pass" => self.pass_mmio_pages(),
            "reader" => number(first, "MiB").and_then(|mib| self.start_reader(mib)),
            "reader-end" => self.end_reader(),
            "net-listen" => {
                number(words.next(), "port").and_then(|port| self.listen(first.unwrap_or(""), port))
            }
            "net-check" => self.check_packets(),
            "meminfo" => meminfo(),
            "poweroff" | "reboot" => end(command),
            other => Err(format!("unknown command '{other}'")),
        };
        match answer {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("ERROR {command}: {error}"),
        }
    }

    fn pong(&self, token: &str) -> String {
        format!("PONG {token} {}", self.tally.report())
    }

    /// Stops background work, if any, and takes the memory out.
    fn take(&mut self) -> Result<Vec<Region>, String> {
        match std::mem::replace(&mut self.memory, Memory::Idle(Vec::new())) {
            Memory::Idle(regions) => Ok(regions),
            Memory::Working(handles) => {
                self.tally.stop.store(true, Ordering::Relaxed);
                handles
                    .into_iter()
                    .map(|handle| {
                        handle
                            .join()
                            .map_err(|_| "a worker failed; see its message".to_owned())
                    })
                    .collect()
            }
        }
    }

    fn halt(&mut self) -> Result<(), String> {
        self.memory = Memory::Idle(self.take()?);
        Ok(())
    }

    /// Runs `work` on every region at once, in the foreground.
    fn on_all(&mut self, work: impl Fn(&mut Region, &Tally) + Sync) -> Result<(), String> {
        let mut regions = self.take()?;
        self.tally.stop.store(false, Ordering::Relaxed);
        let (tally, work) = (&*self.tally, &work);
        thread::scope(|scope| {
            for region in &mut regions {
                scope.spawn(move || work(region, tally));
            }
        });
        self.memory = Memory::Idle(regions);
        Ok(())
    }

    fn allocate(&mut self, share: u64) -> Result<String, String> {
        if !(1..=95).contains(&share) {
            return Err(format!("share {share} is not between 1 and 95 per cent"));
        }
        let ram = ram_bytes().map_err(|error| format!("/proc/iomem: {error}"))?;
        self.fill(ram / 100 * share / PAGE_BYTES as u64)
    }

    /// Takes what the kernel has to give.
    fn allocate_all(&mut self) -> Result<String, String> {
        drop(self.take()?);
        let bytes = available_kib()? << 10;
        let bytes = bytes.checked_sub(RESERVE_BYTES).ok_or("no memory left")?;
        self.fill(bytes / PAGE_BYTES as u64)
    }

    /// Takes so many pages and writes them.
    fn fill(&mut self, pages: u64) -> Result<String, String> {
        drop(self.take()?);
        self.tally = Arc::new(Tally::default());
        let regions = self.filled(0, pages)?;
        let pages = regions.iter().map(Region::len).sum::<usize>();
        self.memory = Memory::Idle(regions);
        Ok(format!("ALLOCATED pages={pages}"))
    }

    /// Takes memory beside what is taken already: the guest has been given more.
    fn allocate_more(&mut self, mib: u64) -> Result<String, String> {
        let mut regions = self.take()?;
        let taken = regions.iter().map(Region::len).sum::<usize>() as u64;
        let filled = self.filled(taken, (mib << 20) / PAGE_BYTES as u64);
        let answer = filled.map(|mut more| {
            let pages = more.iter().map(Region::len).sum::<usize>();
            regions.append(&mut more);
            format!("ALLOCATED pages={pages}")
        });
        self.memory = Memory::Idle(regions);
        answer
    }

    /// Regions of `pages` pages in all, numbered from `first`, one for each worker.
    fn filled(&self, first: u64, pages: u64) -> Result<Vec<Region>, String> {
        let each = pages / self.workers as u64;
        let fill = |worker: u64| {
            let number = first + worker * each;
            thread::spawn(move || Region::filled(number, each as usize, pages))
        };
        let handles: Vec<_> = (0..self.workers as u64).map(fill).collect();
        let regions: Result<Vec<_>, _> = handles.into_iter().map(JoinHandle::join).collect();
        regions.map_err(|_| "a worker failed while it filled".to_owned())
    }

    fn work(&mut self, seconds: u64) -> String {
        if seconds == 0 {
            return match self.work_in_background() {
                Ok(()) => "WORKING".to_owned(),
                Err(error) => format!("ERROR work: {error}"),
            };
        }
        let deadline = Instant::now() + Duration::from_secs(seconds);
        match self.on_all(|region, tally| region.work(Some(deadline), tally)) {
            Ok(()) => format!("WORKED {}", self.tally.report()),
            Err(error) => format!("ERROR work: {error}"),
        }
    }

    fn work_in_background(&mut self) -> Result<(), String> {
        let regions = self.take()?;
        self.tally.stop.store(false, Ordering::Relaxed);
        let start = |mut region: Region| {
            let tally = Arc::clone(&self.tally);
            thread::spawn(move || {
                region.work(None, &tally);
                region
            })
        };
        self.memory = Memory::Working(regions.into_iter().map(start).collect());
        Ok(())
    }

    fn verify(&mut self) -> Result<String, String> {
        self.on_all(Region::verify)?;
        let Memory::Idle(regions) = &self.memory else {
            return Err("workers are still running".to_owned());
        };
        let pages: usize = regions.iter().map(Region::len).sum();
        Ok(format!("CHECKER pages={pages} {}", self.tally.report()))
    }

    fn check(&mut self, share: u64, seconds: u64) -> Result<String, String> {
        println!("{}", self.allocate(share)?);
        println!("{}", self.work(seconds.max(1)));
        let report = self.verify()?;
        drop(self.take()?);
        Ok(report)
    }

    fn damage(&mut self, pages: u64, how: fn(&mut Region, usize)) -> Result<String, String> {
        let mut regions = self.take()?;
        let region = regions.first_mut().ok_or("no memory allocated")?;
        how(region, pages as usize);
        self.memory = Memory::Idle(regions);
        Ok("BROKEN".to_owned())
    }

    fn listen(&mut self, address: &str, port: u64) -> Result<String, String> {
        let port = u16::try_from(port).map_err(|_| format!("{port} is no port"))?;
        self.packets = Some(Packets::listen(address, port)?);
        Ok("NET packets=0 wrong=0".to_owned())
    }

    fn check_packets(&mut self) -> Result<String, String> {
        let packets = self.packets.take().ok_or("'net-listen' comes first")?;
        let (packets, wrong) = packets.check()?;
        Ok(format!("NET packets={packets} wrong={wrong}"))
    }

    fn start_reader(&mut self, mib: u64) -> Result<String, String> {
        self.reader = Some(Reader::start(mib)?);
        Ok(format!("READER pages={}", (mib << 20) / PAGE_BYTES as u64))
    }

    fn end_reader(&mut self) -> Result<String, String> {
        let reader = self.reader.take().ok_or("reader comes first")?;
        Ok(format!("READER signal={}", reader.wait()?))
    }

    fn fill_mmio_pages(&mut self, pages: u64) -> String {
        self.mmio_pages = Some(mmio::Pages::filled(pages as usize));
        format!("MMIO pages={pages}")
    }

    fn pass_mmio_pages(&mut self) -> Result<String, String> {
        let pages = self.mmio_pages.as_mut().ok_or("mmio-pages comes first")?;
        let wrong = pages.pass().map_err(|error| error.to_string())?;
        Ok(format!("MMIO pages={} wrong={wrong}", pages.len()))
    }

    fn read_disk(&mut self, count: u64) -> Result<String, String> {
        let mut regions = self.take()?;
        let region = regions.first_mut().ok_or("no memory allocated")?;
        let report = disk::read(region, count as usize, &self.tally);
        self.memory = Memory::Idle(regions);
        report
            .map(|report| format!("DISK {report}"))
            .map_err(|error| error.to_string())
    }
}

/// A line of /proc/meminfo, in KiB.
fn kib(info: &str, name: &str) -> Option<u64> {
    let rest = info.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn available_kib() -> Result<u64, String> {
    let info = std::fs::read_to_string("/proc/meminfo").map_err(|error| error.to_string())?;
    kib(&info, "MemAvailable:").ok_or_else(|| "/proc/meminfo has no MemAvailable".to_owned())
}

fn meminfo() -> Result<String, String> {
    let info = std::fs::read_to_string("/proc/meminfo").map_err(|error| error.to_string())?;
    let kib = |name| kib(&info, name).unwrap_or(0);
    Ok(format!(
        "MEMINFO total_kib={} free_kib={} available_kib={}",
        kib("MemTotal:"),
        kib("MemFree:"),
        kib("MemAvailable:")
    ))
}

fn end(how: &str) -> Result<String, String> {
    println!("ENDING {how}");
    let status = Command::new("/bin/busybox").args([how, "-f"]).status();
    match status {
        Ok(status) if status.success() => Ok("ENDED".to_owned()),
        Ok(status) => Err(format!("busybox {how} -f: {status}")),
        Err(error) => Err(format!("busybox: {error}")),
    }
}

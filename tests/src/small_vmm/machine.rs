//! The machine: its main thread, its vCPUs and what they can be commanded to do.
//!
//! By a vCPU (`vcpu`, 0 unless said; `page` and `pages` are guest pages):
//!
//! | `do` | with | answers |
//! |---|---|---|
//! | `fill` | `page` `pages` | rewrites each page with its next version |
//! | `verify` | `page` `pages` | `checked` `mismatches` `first_bad` |
//! | `work` | `page` `pages` `seconds` `write_share` `seed` | verifies and rewrites at random |
//! | `touch` | `page` `pages` `write` | accesses one word of each page |
//! | `probe` | `page` `pages` `count` `skip` `seed` | reads pages that are not in the memfd, one at a time, at random: `latencies`, without the first `skip` |
//! | `hold` | `page` `pages` `seconds` | uses the pages over and over: `latencies` of each use |
//! | `workload` | `task` `phase` | `prepare`, `run` or `digest` of a [workload](crate::bench::workloads), from page 0 on |
//! | `discard` | `page` `pages` | gives pages back as a balloon does; they read as zeros then |
//! | `race` | `page` `pages` `writers` `readers` `discarders` `droppers` `rounds` | all on the same pages: `stale` `vanished` |
//! | `pipe` | `page` `pages` | each page out through a pipe and back, by the kernel |
//! | `write-file` | `page` `pages` | the next version, into the memfd past the mapping |
//! | `present` | `page` `pages` | how many are in the memfd |
//! | `peek` | `address` `length` | `bytes` in hexadecimal |
//! | `poke` | `address` `bytes` | stores them |
//! | `request` | `queue` `type` `sector` `bytes` `page` `wait_ms` | `status` `used` `data` |
//! | `submit` | `queue` `descriptors` `head` `wait_ms` | any chain, `[[address,length,flags,next],…]`: `used` `broken` |
//! | `overrun` | `queue` `by` `wait_ms` | offers more than there is; whether it was reported `broken` |
//! | `disk-load` | `queue` `first` `blocks` `page` `depth` `seconds` `seed` | requests of all sorts at a time: `mismatches` `errors` |
//!
//! By the main thread: `connect`, `connect-silently` (says nothing there), `disconnect`, `disk-start` (`queue` `size` `page` `event_idx`), `disk-again`
//! (tells every started queue to a new connection, as it is), `disk-stop` (`queue`; `keep`: to be told again), `plug` (`bytes`), `log-start` (`bytes`: of the log of pages that the device writes, large
//! enough unless said), `log-take` (answers `pages`), `log-stop`, `bombard` (`count`: signals to every vCPU), `info`, `exit`, `abort`.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use outram_wire::units::PageSize;
use serde_json::{Value, json};
use vm_memory::Bytes;

use super::arguments::Arguments;
use super::dirty_log::DirtyLog;
use super::disk::{Descriptor, Request, Rings, SharedRings, hex, unhex};
use super::disk_load::DiskLoad;
use super::front_end::FrontEnd;
use super::pattern::{Stretch, Versions};
use super::probe;
use super::race::{Players, Race};
use super::ram::Ram;
use super::signals;

/// What main thread and vCPUs share.
#[derive(Default)]
struct Board {
    ram: Ram,
    versions: Versions,
    queues: Mutex<BTreeMap<u64, SharedRings>>,
}

/// Makes the machine and obeys until `exit` or the end of standard input.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let board = Arc::new(Board::default());
    for block in &arguments.ram {
        let page = match block.huge {
            true => PageSize::HUGE,
            false => PageSize::BASE,
        };
        let made = board.ram.plug_pages(block.size, page, false)?;
        if block.prealloc {
            let step = made.discard_pages() as usize;
            for index in (0..block.size / PageSize::BASE.bytes()).step_by(step) {
                made.page(index)?.store(0u64, 0, Ordering::Relaxed)?;
            }
        }
    }
    board.versions.resize(board.ram.pages());
    signals::catch()?;
    let vcpus: Vec<Vcpu> = (0..arguments.vcpus)
        .map(|index| start_vcpu(index, Arc::clone(&board)))
        .collect::<Result<_>>()?;
    let mut front_end = None;
    if let Some(path) = &arguments.socket {
        // A refusal is told, not fatal: QEMU's machine would not have started, but this one can
        // still be commanded to try again.
        let connected = FrontEnd::connect(path).map(|front| front_end = Some(front));
        tell(
            &json!({"event": "connected"}),
            connected.map(|()| json!({})),
        );
    } else {
        tell(&json!({"event": "started"}), Ok(json!({})));
    }
    // Kept open.
    let mut silent = None;
    for line in std::io::stdin().lock().lines() {
        let command: Value = match serde_json::from_str(&line?) {
            Ok(command) => command,
            Err(error) => {
                tell(&json!({"id": null}), Err(error.into()));
                continue;
            }
        };
        match command["do"].as_str() {
            Some("exit") => return Ok(ExitCode::SUCCESS),
            Some("abort") => std::process::abort(),
            Some("bombard") => {
                let threads = vcpus.iter().map(|vcpu| &vcpu.thread);
                let result =
                    number(&command, "count").and_then(|count| signals::bombard(threads, count));
                tell(&command, result);
            }
            Some("connect-silently") => {
                front_end = None;
                let path = arguments.socket.as_deref().context("there is no socket");
                let connected = path.and_then(|path| Ok(UnixStream::connect(path)?));
                let result = connected.map(|stream| silent = Some(stream));
                tell(&command, result.map(|_| json!({})));
            }
            Some(
                action @ ("connect" | "disconnect" | "disk-start" | "disk-again" | "disk-stop"
                | "plug" | "unplug" | "info" | "log-start" | "log-take" | "log-stop"),
            ) => {
                silent = None;
                let path = arguments.socket.as_deref();
                let result = obey_on_main(action, &command, &board, &mut front_end, path);
                tell(&command, result);
            }
            _ => {
                let index = command["vcpu"].as_u64().unwrap_or(0) as usize;
                let sent = vcpus
                    .get(index)
                    .with_context(|| format!("there is no vCPU {index}"))
                    .and_then(|vcpu| Ok(vcpu.commands.send(command.clone())?));
                if let Err(error) = sent {
                    tell(&command, Err(error));
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Answers a command.
fn tell(command: &Value, result: Result<Value>) {
    let key = if command["event"].is_null() {
        "id"
    } else {
        "event"
    };
    let answer = match result {
        Ok(value) => json!({key: command[key], "ok": value}),
        Err(error) => json!({key: command[key], "error": format!("{error:#}")}),
    };
    let mut stdout = std::io::stdout().lock();
    // Whoever commands us may be gone; standard input will say so.
    let _ = writeln!(stdout, "{answer}").and_then(|()| stdout.flush());
}

/// A vCPU: its thread, and where its commands go.
struct Vcpu {
    commands: mpsc::Sender<Value>,
    thread: JoinHandle<()>,
}

fn start_vcpu(index: usize, board: Arc<Board>) -> Result<Vcpu> {
    let (sender, commands) = mpsc::channel::<Value>();
    let thread = std::thread::Builder::new()
        .name(format!("CPU {index}/SMALL"))
        .spawn(move || {
            let mut subject = None;
            for command in commands {
                let result = match command["do"].as_str() {
                    Some("workload") => probe::work(&command, &board.ram, &mut subject),
                    _ => obey(&command, &board),
                };
                tell(&command, result);
            }
        })?;
    Ok(Vcpu {
        commands: sender,
        thread,
    })
}

fn number(command: &Value, key: &str) -> Result<u64> {
    command[key]
        .as_u64()
        .with_context(|| format!("'{key}' must be a number"))
}

fn wait_of(command: &Value) -> Duration {
    Duration::from_millis(command["wait_ms"].as_u64().unwrap_or(120_000))
}

fn obey_on_main(
    action: &str,
    command: &Value,
    board: &Board,
    front_end: &mut Option<FrontEnd>,
    path: Option<&str>,
) -> Result<Value> {
    if action == "connect" {
        // The old connection first: a backend serves one at a time.
        *front_end = None;
        *front_end = Some(FrontEnd::connect(path.context("there is no socket")?)?);
    }
    if action == "disconnect" {
        *front_end = None;
        return Ok(json!({}));
    }
    if action == "plug" || action == "unplug" {
        match action {
            "plug" => plug(command, board, front_end.as_mut())?,
            _ => unplug(command, board, front_end.as_mut())?,
        }
        return Ok(json!({"pages": board.ram.pages()}));
    }
    let front = front_end.as_mut().context("not connected")?;
    match action {
        "disk-start" => {
            let queue = number(command, "queue")?;
            let size = u16::try_from(number(command, "size")?)?;
            let page = number(command, "page")?;
            let event_idx = command["event_idx"].as_bool().unwrap_or(true);
            let kind = (size, event_idx);
            let rings = Rings::lay_out(&board.ram, queue as usize, kind, page)?;
            front.start(&board.ram, &rings)?;
            let mut queues = board.queues.lock().expect("no holder panics");
            queues.insert(queue, Arc::new(Mutex::new(rings)));
            Ok(json!({}))
        }
        "disk-again" => {
            for rings in board.queues.lock().expect("no holder panics").values() {
                let rings = rings.lock().expect("no holder panics");
                front.start(&board.ram, &rings)?;
            }
            Ok(json!({}))
        }
        "disk-stop" => {
            let queue = number(command, "queue")?;
            let base = front.stop(queue as usize)?;
            if !command["keep"].as_bool().unwrap_or(false) {
                let mut queues = board.queues.lock().expect("no holder panics");
                queues.remove(&queue);
            }
            Ok(json!({"base": base}))
        }
        "log-start" | "log-stop" => {
            let log = match action {
                "log-start" => Some(DirtyLog::new(&board.ram, command["bytes"].as_u64())?),
                _ => None,
            };
            front.set_log(log)?;
            for rings in board.queues.lock().expect("no holder panics").values() {
                front.tell_rings(&board.ram, &rings.lock().expect("no holder panics"))?;
            }
            Ok(json!({}))
        }
        "log-take" => {
            let log = front.log.as_ref().context("nothing is logged")?;
            Ok(json!({"pages": log.take()?}))
        }
        _ => Ok(json!({
            "pages": board.ram.pages(),
            "features": front.features,
            "queues": front.queues,
            "config": hex(&front.config),
        })),
    }
}

fn plug(command: &Value, board: &Board, front: Option<&mut FrontEnd>) -> Result<()> {
    let private = command["private"].as_bool().unwrap_or(false);
    let block = board.ram.plug(number(command, "bytes")?, private)?;
    board.versions.resize(board.ram.pages());
    match front {
        Some(front) => front.plug(&block),
        None => Ok(()),
    }
}

/// In QEMU's order: the back end is told first.
fn unplug(command: &Value, board: &Board, front: Option<&mut FrontEnd>) -> Result<()> {
    let block = board.ram.unplug()?;
    if let Some(front) = front {
        front.unplug(&block)?;
    }
    if command["yank"].as_bool().unwrap_or(false) {
        block.yank()?;
    }
    board.versions.resize(board.ram.pages());
    Ok(())
}

fn obey(command: &Value, board: &Board) -> Result<Value> {
    match command["do"].as_str().context("'do' must be a word")? {
        "peek" => {
            let bytes = board
                .ram
                .read(number(command, "address")?, number(command, "length")?)?;
            Ok(json!({"bytes": hex(&bytes)}))
        }
        "poke" => {
            let bytes = unhex(command["bytes"].as_str().context("'bytes' must be text")?)?;
            board.ram.write(number(command, "address")?, &bytes)?;
            Ok(json!({}))
        }
        "request" | "submit" | "overrun" | "disk-load" => drive_disk(command, board),
        action => use_stretch(action, command, board),
    }
}

fn use_stretch(action: &str, command: &Value, board: &Board) -> Result<Value> {
    let (page, pages) = (number(command, "page")?, number(command, "pages")?);
    if matches!(action, "discard" | "remap") {
        // Also of far more pages than were ever used.
        match action {
            "discard" => board.ram.discard(page, pages)?,
            _ => board.ram.remap(page, pages)?,
        }
        board.versions.forget(page, pages);
        return Ok(json!({"pages": pages}));
    }
    let stretch = Stretch::new(&board.ram, &board.versions, page, pages)?;
    match action {
        "fill" => stretch.fill(),
        "verify" => stretch.verify(),
        "touch" => stretch.touch(command["write"].as_bool().unwrap_or(false)),
        "work" => stretch.work(
            command["seconds"].as_f64().unwrap_or(1.0),
            command["write_share"].as_f64().unwrap_or(0.5),
            command["seed"].as_u64().unwrap_or(1),
        ),
        "pipe" => stretch.pipe(),
        "probe" => probe::absent(
            &stretch,
            number(command, "count")?,
            command["skip"].as_u64().unwrap_or(0),
            command["seed"].as_u64().unwrap_or(1),
        ),
        "hold" => probe::hold(&stretch, command["seconds"].as_f64().unwrap_or(1.0)),
        "write-file" => stretch.write_file(),
        "present" => stretch.present(),
        "race" => {
            let some = |key: &str| command[key].as_u64().unwrap_or(0);
            let players = Players {
                writers: number(command, "writers")?,
                readers: some("readers"),
                discarders: some("discarders"),
                droppers: some("droppers"),
                rounds: number(command, "rounds")?,
            };
            Race::new(&board.ram, &stretch, page).run(players, &stretch)
        }
        "unmap" => {
            board.ram.unmap(page, pages)?;
            Ok(json!({"pages": pages}))
        }
        other => bail!("unknown command '{other}'"),
    }
}

fn drive_disk(command: &Value, board: &Board) -> Result<Value> {
    let queue = command["queue"].as_u64().unwrap_or(0);
    let rings = {
        let queues = board.queues.lock().expect("no holder panics");
        let rings = queues.get(&queue);
        Arc::clone(rings.with_context(|| format!("queue {queue} is not started"))?)
    };
    if command["do"] == "disk-load" {
        let load = DiskLoad {
            first: number(command, "first")?,
            blocks: number(command, "blocks")?,
            page: number(command, "page")?,
            depth: u16::try_from(number(command, "depth")?)?,
            seconds: command["seconds"].as_f64().unwrap_or(1.0),
            seed: command["seed"].as_u64().unwrap_or(1),
        };
        return load.run(&board.ram, &rings);
    }
    let mut rings = rings.lock().expect("no holder panics");
    match command["do"].as_str() {
        Some("request") => Request {
            kind: u32::try_from(number(command, "type")?)?,
            sector: number(command, "sector")?,
            bytes: u32::try_from(number(command, "bytes")?)?,
            page: number(command, "page")?,
        }
        .run(&board.ram, &mut rings, wait_of(command)),
        Some("overrun") => {
            let by = u16::try_from(number(command, "by")?)?;
            rings.overrun(&board.ram, by)?;
            Ok(json!({"broken": rings.wait_until_broken(wait_of(command))}))
        }
        _ => {
            let list = command["descriptors"].as_array();
            let descriptors: Vec<Descriptor> = list
                .context("'descriptors' must be a list")?
                .iter()
                .map(descriptor)
                .collect::<Result<_>>()?;
            let head = u16::try_from(command["head"].as_u64().unwrap_or(0))?;
            rings.submit(&board.ram, &descriptors, head, wait_of(command))
        }
    }
}

fn descriptor(value: &Value) -> Result<Descriptor> {
    let field = |index: usize| {
        value[index]
            .as_u64()
            .with_context(|| format!("a descriptor is [address,length,flags,next], not {value}"))
    };
    Ok(Descriptor {
        address: field(0)?,
        length: u32::try_from(field(1)?)?,
        flags: u16::try_from(field(2)?)?,
        next: u16::try_from(field(3)?)?,
    })
}

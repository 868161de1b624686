//! A guest's serial line: commands in, answers out.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Lines shown of a console when something expected did not come.
const SHOWN_LINES: usize = 15;

#[derive(Debug, Default)]
struct Heard {
    lines: Vec<String>,
    partial: Vec<u8>,
    closed: bool,
}

/// An open serial line. All it says is read at once, so the guest never waits for us.
#[derive(Debug)]
pub struct Console {
    socket: UnixStream,
    heard: Arc<(Mutex<Heard>, Condvar)>,
    /// Lines already taken by [`Console::expect`].
    taken: usize,
}

/// The `key=value` fields of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The whole line.
    pub line: String,
    /// Its numeric fields.
    pub fields: BTreeMap<String, u64>,
}

impl Answer {
    fn parse(line: &str) -> Self {
        let fields = line
            .split_whitespace()
            .filter_map(|word| {
                let (key, value) = word.split_once('=')?;
                Some((key.to_owned(), value.parse().ok()?))
            })
            .collect();
        Self {
            line: line.to_owned(),
            fields,
        }
    }

    /// A field that must be there.
    pub fn get(&self, field: &str) -> Result<u64> {
        self.fields
            .get(field)
            .copied()
            .with_context(|| format!("'{}' has no field {field}", self.line))
    }
}

impl Console {
    /// Connects to the socket that QEMU serves the line on.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        let heard = Arc::new((Mutex::new(Heard::default()), Condvar::new()));
        let (reader, into) = (socket.try_clone()?, Arc::clone(&heard));
        std::thread::spawn(move || listen(reader, &into));
        Ok(Self {
            socket,
            heard,
            taken: 0,
        })
    }

    /// Sends one command line.
    pub fn send(&mut self, command: &str) -> Result<()> {
        self.socket
            .write_all(format!("{command}\n").as_bytes())
            .with_context(|| format!("sending '{command}' to the guest"))
    }

    /// Waits for a line that begins with one of `starts`, and takes it and all before it.
    /// The guest's own `ERROR`, a panic of its kernel or the line's end fail at once.
    pub fn expect(&mut self, starts: &[&str], limit: Duration) -> Result<Answer> {
        let Some(answer) = self.hear(starts, limit)? else {
            bail!(
                "waited for {starts:?}, but nothing came for {limit:?}; last lines:\n{}",
                self.tail()
            );
        };
        Ok(answer)
    }

    /// As [`Console::expect`], but that nothing came in time is no error.
    pub fn hear(&mut self, starts: &[&str], limit: Duration) -> Result<Option<Answer>> {
        let deadline = Instant::now() + limit;
        let (lock, arrived) = &*self.heard;
        let mut heard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            while let Some(line) = heard.lines.get(self.taken) {
                self.taken += 1;
                if starts.iter().any(|start| line.starts_with(start)) {
                    return Ok(Some(Answer::parse(line)));
                }
                if line.starts_with("ERROR") || line.contains("Kernel panic") {
                    bail!("the guest said: {line}\n{}", tail(&heard));
                }
            }
            if heard.closed {
                bail!(
                    "waited for {starts:?}, but the serial line closed; last lines:\n{}",
                    tail(&heard)
                );
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            heard = arrived
                .wait_timeout(heard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, command: &str, start: &str, limit: Duration) -> Result<Answer> {
        self.send(command)?;
        self.expect(&[start], limit)
            .with_context(|| format!("after the command '{command}'"))
    }

    fn tail(&self) -> String {
        tail(&self.heard.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Everything heard so far.
    pub fn transcript(&self) -> Vec<String> {
        let heard = self.heard.0.lock().unwrap_or_else(PoisonError::into_inner);
        heard.lines.clone()
    }
}

fn tail(heard: &Heard) -> String {
    let from = heard.lines.len().saturating_sub(SHOWN_LINES);
    heard.lines[from..].join("\n")
}

fn listen(mut socket: UnixStream, into: &(Mutex<Heard>, Condvar)) {
    let mut buffer = [0; 4096];
    loop {
        let read = match socket.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let mut heard = into.0.lock().unwrap_or_else(PoisonError::into_inner);
        for byte in &buffer[..read] {
            match byte {
                b'\n' => {
                    let line = std::mem::take(&mut heard.partial);
                    let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                    heard.lines.push(line);
                }
                other => heard.partial.push(*other),
            }
        }
        into.1.notify_all();
    }
    let mut heard = into.0.lock().unwrap_or_else(PoisonError::into_inner);
    heard.closed = true;
    into.1.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_fields() {
        let answer = Answer::parse("CHECKER pages=12 checked=90 mismatches=0 note=x");
        assert_eq!(answer.get("checked").expect("is there"), 90);
        assert!(answer.get("note").is_err());
    }
}

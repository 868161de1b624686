//! Commands a small VMM from a test.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::hermetic::command::wait_for;

/// Longest time an answer is waited for unless said otherwise.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A running small VMM. Killed when dropped.
pub struct SmallVmm {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<Value>,
    early: Vec<Value>,
    next_id: u64,
}

/// How a small VMM is started.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The program `small-vmm`.
    pub program: &'a Path,
    /// Sizes of its blocks of RAM, such as `64M`, each with what else QEMU is to be told of it, such
    /// as `64M,prealloc=on`.
    pub ram: &'a [&'a str],
    /// The backend's socket, if it has a disk.
    pub socket: Option<&'a Path>,
    /// vCPU threads.
    pub vcpus: usize,
    /// Whether its command line asks for KVM, as a backend sees it; there is none.
    pub names_kvm: bool,
    /// User and group it runs as; ours unless said.
    pub user: Option<u32>,
}

impl SmallVmm {
    /// Starts one, without waiting for its connection.
    pub fn start(plan: &Plan<'_>) -> Result<Self> {
        let mut command = Command::new(plan.program);
        for (index, size) in plan.ram.iter().enumerate() {
            let object = format!("memory-backend-memfd,id=ram-node{index},size={size},share=on");
            command.args(["-object", &object]);
        }
        if let Some(socket) = plan.socket {
            let chardev = format!("socket,id=c0,path={}", socket.display());
            let device = "vhost-user-blk-pci,chardev=c0";
            command.args(["-chardev", &chardev, "-device", device]);
        }
        command.args(["-smp", &plan.vcpus.to_string()]);
        if plan.names_kvm {
            command.args(["-accel", "kvm"]);
        }
        if let Some(user) = plan.user {
            command.uid(user).gid(user);
        }
        Self::spawn(command)
    }

    /// Starts any program that takes commands as the small VMM does.
    pub fn spawn(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        let stdin = child.stdin.take().context("no standard input")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let answer = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if sender.send(answer).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            answers,
            early: Vec::new(),
            next_id: 1,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until it is connected to its backend (or told why not).
    pub fn wait_connected(&mut self) -> Result<Value> {
        self.wait_for("event", &Value::from("connected"), PATIENCE)
    }

    /// Sends a command without waiting; its id.
    pub fn send(&mut self, mut command: Value) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        command["id"] = Value::from(id);
        writeln!(self.stdin, "{command}").context("the small VMM takes no more commands")?;
        Ok(id)
    }

    /// Waits for a command's answer.
    pub fn wait(&mut self, id: u64, patience: Duration) -> Result<Value> {
        self.wait_for("id", &Value::from(id), patience)
    }

    /// A command's answer, if it has come.
    pub fn poll(&mut self, id: u64) -> Result<Option<Value>> {
        self.early.extend(self.answers.try_iter());
        let key = Value::from(id);
        match self.early.iter().any(|answer| answer["id"] == key) {
            true => self.wait(id, Duration::ZERO).map(Some),
            false => Ok(None),
        }
    }

    /// Sends a command and waits for its answer.
    pub fn command(&mut self, command: Value) -> Result<Value> {
        let id = self.send(command)?;
        self.wait(id, PATIENCE)
    }

    fn wait_for(&mut self, key: &str, value: &Value, patience: Duration) -> Result<Value> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(index) = self.early.iter().position(|answer| answer[key] == *value) {
                let mut answer = self.early.remove(index);
                if let Some(error) = answer["error"].as_str() {
                    bail!("the small VMM says: {error}");
                }
                return Ok(answer["ok"].take());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self
                .answers
                .recv_timeout(left)
                .with_context(|| format!("no answer with {key} {value} within {patience:?}"))?;
            self.early.push(answer);
        }
    }

    /// Lets it end by itself.
    pub fn exit(mut self) -> Result<()> {
        let _ = self.send(serde_json::json!({"do": "exit"}));
        let status = self.child.wait()?;
        anyhow::ensure!(status.success(), "the small VMM ended with {status}");
        Ok(())
    }

    /// Waits for an end that it comes to by itself, or by its own doing.
    pub fn wait_end(&mut self) -> Result<ExitStatus> {
        wait_for("the small VMM to end", PATIENCE, || {
            Ok(self.child.try_wait()?)
        })
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for SmallVmm {
    fn drop(&mut self) {
        // Gone already, or ours to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! QEMU's command line: what its memory backends are, and which devices forbid paging.
//!
//! libvirt writes JSON (`-object {"qom-type":…}`), people write `-object memory-backend-memfd,id=…`.
//! Hot-plugged things are not in it; what matters of those is looked for among the open files too.

use serde_json::Value;

/// An option's value as properties: of its JSON object, or of `first,key=value,…`, where the
/// first stands under the empty key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Properties(Vec<(String, String)>);

impl Properties {
    fn parse(text: &str) -> Self {
        if let Ok(Value::Object(object)) = serde_json::from_str(text) {
            let plain = |value: Value| match value {
                Value::String(text) => text,
                other => other.to_string(),
            };
            return Self(object.into_iter().map(|(k, v)| (k, plain(v))).collect());
        }
        let mut properties = Vec::new();
        for part in split_at_single_commas(text) {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                // A bare word: the type where it is the first, else a switch.
                None if properties.is_empty() => (String::new(), part),
                None => (part, "on".to_owned()),
            };
            properties.push((key, value));
        }
        Self(properties)
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// Whether a switch is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        matches!(self.get(key), Some("on" | "true" | "yes" | "1"))
    }

    /// Its type: what comes first, or under one of JSON's names for it.
    pub(super) fn kind(&self) -> &str {
        ["", "qom-type", "driver", "type"]
            .into_iter()
            .find_map(|key| self.get(key))
            .unwrap_or("")
    }
}

/// Splits at commas; a doubled comma is one that belongs to the text.
fn split_at_single_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character == ',' && characters.peek() != Some(&',') {
            parts.push(String::new());
            continue;
        }
        if character == ',' {
            characters.next();
        }
        if let Some(part) = parts.last_mut() {
            part.push(character);
        }
    }
    parts
}

/// A `memory-backend-…` object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryBackend {
    /// Such as `memory-backend-memfd`.
    pub kind: String,
    /// Its id.
    pub id: String,
    /// Its size in bytes, if stated.
    pub size: Option<u64>,
    /// Whether it is populated at start.
    pub prealloc: bool,
}

/// A command line, as options with their values.
#[derive(Clone, Debug, Default)]
pub(super) struct CommandLine(Vec<(String, Properties)>);

impl CommandLine {
    /// From the bytes of `/proc/PID/cmdline`.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let words: Vec<String> = bytes
            .split(|&byte| byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        let mut options = Vec::new();
        for (index, word) in words.iter().enumerate().skip(1) {
            let Some(name) = word.strip_prefix('-') else {
                continue;
            };
            // QEMU accepts two dashes as well. A value that begins with a dash is its own option
            // here; none of those that matter does.
            let name = name.strip_prefix('-').unwrap_or(name);
            let value = words.get(index + 1).filter(|next| !next.starts_with('-'));
            let properties = value.map(|value| Properties::parse(value));
            options.push((name.to_owned(), properties.unwrap_or_default()));
        }
        Self(options)
    }

    /// Values of every option of this name.
    pub(super) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Properties> {
        self.0
            .iter()
            .filter(move |(option, _)| option == name)
            .map(|(_, properties)| properties)
    }

    /// Whether there is an option of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.all(name).next().is_some()
    }

    /// Whether it asks for KVM.
    pub(super) fn is_under_kvm(&self) -> bool {
        self.has("enable-kvm")
            || self.all("accel").any(|accel| accel.kind() == "kvm")
            || self
                .all("machine")
                .any(|machine| machine.get("accel") == Some("kvm"))
    }

    /// The memory backends, in the order of their creation.
    pub(super) fn memory_backends(&self) -> Vec<MemoryBackend> {
        self.all("object")
            .filter(|object| object.kind().starts_with("memory-backend-"))
            .map(|object| MemoryBackend {
                kind: object.kind().to_owned(),
                id: object.get("id").unwrap_or("").to_owned(),
                size: object.get("size").and_then(size_of),
                prealloc: object.is_on("prealloc"),
            })
            .collect()
    }

    /// Ids of the backends behind devices whose contents are others' data.
    pub(super) fn foreign_backends(&self) -> Vec<String> {
        const FOREIGN: [&str; 4] = ["ivshmem", "nvdimm", "virtio-pmem", "cxl-type3"];
        self.all("device")
            .filter(|device| FOREIGN.iter().any(|kind| device.kind().starts_with(kind)))
            .filter_map(|device| device.get("memdev"))
            .map(str::to_owned)
            .collect()
    }
}

/// QEMU's sizes: a number with an optional binary suffix.
fn size_of(text: &str) -> Option<u64> {
    outram_wire::units::parse_size(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> CommandLine {
        let mut bytes = b"qemu\0".to_vec();
        for word in words {
            bytes.extend_from_slice(word.as_bytes());
            bytes.push(0);
        }
        CommandLine::parse(&bytes)
    }

    #[test]
    fn both_spellings_of_a_backend_are_read() {
        let line = parse(&[
            "-object",
            r#"{"qom-type":"memory-backend-memfd","id":"ram-node0","size":134217728,"prealloc":true}"#,
            "-object",
            "memory-backend-memfd,id=ram-node1,size=128M,share=on",
            "-object",
            "rng-random,id=rng0",
        ]);
        let backends = line.memory_backends();
        assert_eq!(backends.len(), 2);
        assert_eq!(backends[0].id, "ram-node0");
        assert_eq!(backends[0].size, Some(128 << 20));
        assert!(backends[0].prealloc);
        assert_eq!(backends[1].kind, "memory-backend-memfd");
        assert_eq!(backends[1].size, Some(128 << 20));
        assert!(!backends[1].prealloc);
    }

    #[test]
    fn doubled_commas_belong_to_the_value() {
        let line = parse(&["-device", "vhost-user-blk-pci,chardev=a,,b,bootindex=1"]);
        let device = line.all("device").next().expect("one device");
        assert_eq!(device.kind(), "vhost-user-blk-pci");
        assert_eq!(device.get("chardev"), Some("a,b"));
        assert_eq!(device.get("bootindex"), Some("1"));
    }

    #[test]
    fn backends_of_foreign_data_are_named() {
        let line = parse(&[
            "-device",
            r#"{"driver":"nvdimm","memdev":"memnvdimm0","id":"nvdimm0"}"#,
            "-device",
            "ivshmem-plain,memdev=shm0",
            "-device",
            "pc-dimm,memdev=memdimm0",
        ]);
        assert_eq!(line.foreign_backends(), ["memnvdimm0", "shm0"]);
    }
}

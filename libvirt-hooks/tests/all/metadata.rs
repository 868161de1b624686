//! The settings element: what is read, what is written, and what each mistake is told.

use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::metadata::{
    Addition, DiskSettings, MemorySettings, read, to_plain_text, to_text,
};
use outram_wire::disk::DiskKey;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, LocalRatio};

const NS: &str = "xmlns:o='https://outram.dev/xmlns/domain/1'";

fn domain(metadata: &str) -> DomainXml {
    DomainXml::parse(&format!(
        "<domain type='kvm'><name>n</name><metadata>{metadata}</metadata></domain>"
    ))
    .expect("well-formed")
}

fn settings() -> MemorySettings {
    MemorySettings {
        limit: Limit::LocalBytes(512 << 20),
        servers: vec!["10.0.0.2:7741".parse().expect("an address")],
        seal: Seal::On,
        lost_pages: LostPages::Stop,
        tuning: Tuning::default(),
        disk: None,
        added: vec![Addition::Source, Addition::PciController(7)],
    }
}

#[test]
fn settings_have_this_form() {
    assert_eq!(
        to_text(&settings()).expect("text"),
        "<outram:memory xmlns:outram=\"https://outram.dev/xmlns/domain/1\" local=\"512MiB\" \
         added=\"source pci-controller:7\"><outram:server address=\"10.0.0.2:7741\"/></outram:memory>"
    );
    assert_eq!(
        to_plain_text(&settings()).expect("text"),
        "<memory local=\"512MiB\" added=\"source pci-controller:7\">\
         <server address=\"10.0.0.2:7741\"/></memory>"
    );
}

#[test]
fn settings_are_read_as_written() {
    for limit in [
        Limit::LocalBytes(512 << 20),
        Limit::LocalBytes(4097),
        Limit::LocalBytes(3 << 30),
        Limit::LocalRatio(LocalRatio::new(0.3).expect("a ratio")),
        Limit::LocalRatio(LocalRatio::new(1.0).expect("a ratio")),
    ] {
        let settings = MemorySettings {
            limit,
            ..settings()
        };
        let text = to_text(&settings).expect("text");
        assert_eq!(read(&domain(&text)).expect("read"), Some(settings));
    }
}

#[test]
fn what_becomes_of_lost_pages_is_read_as_written() {
    let settings = MemorySettings {
        lost_pages: LostPages::Poison,
        ..settings()
    };
    let text = to_text(&settings).expect("text");
    assert!(text.contains(" lost-pages=\"poison\" "), "{text}");
    assert_eq!(read(&domain(&text)).expect("read"), Some(settings));
    let wrong = format!("<o:memory {NS} local-ratio='0.5' lost-pages='zero'/>");
    let error = read(&domain(&wrong)).expect_err("no such word");
    assert!(error.to_string().contains("'stop' or 'poison'"), "{error}");
}

#[test]
fn how_memory_is_moved_is_read_as_written() {
    let settings = MemorySettings {
        tuning: Tuning {
            granularity: "64KiB".parse().ok(),
            workers: "4".parse().ok(),
            queue_depth: "16".parse().ok(),
            compressed_share: "0.25".parse().ok(),
        },
        ..settings()
    };
    let text = to_text(&settings).expect("text");
    let attributes =
        r#" granularity="64KiB" workers="4" queue-depth="16" compressed-share="0.25" "#;
    assert!(text.contains(attributes), "{text}");
    assert_eq!(read(&domain(&text)).expect("read"), Some(settings));
    for (attribute, wrong, expected) in [
        ("granularity", "3MiB", "256 KiB"),
        ("workers", "0", "from 1 to 64"),
        ("queue-depth", "65", "from 1 to 64"),
        ("compressed-share", "0.6", "to 0.5"),
    ] {
        let text = format!("<o:memory {NS} local-ratio='0.5' {attribute}='{wrong}'/>");
        let error = read(&domain(&text)).expect_err(wrong).to_string();
        let named = error.contains(&format!("'{attribute}'")) && error.contains(wrong);
        assert!(named && error.contains(expected), "{error}");
    }
}

#[test]
fn whether_pages_are_sealed_is_read_as_written() {
    let settings = MemorySettings {
        seal: Seal::Off,
        ..settings()
    };
    let text = to_text(&settings).expect("text");
    assert!(text.contains(" local=\"512MiB\" seal=\"off\" "), "{text}");
    assert_eq!(read(&domain(&text)).expect("read"), Some(settings));
    for (seal, expected) in [("on", Ok(Seal::On)), ("no", Err("'on' or 'off'"))] {
        let metadata = format!("<o:memory {NS} local-ratio='0.5' seal='{seal}'/>");
        match (read(&domain(&metadata)), expected) {
            (Ok(read), Ok(expected)) => assert_eq!(read.map(|read| read.seal), Some(expected)),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (read, _) => panic!("{seal}: {read:?}"),
        }
    }
}

#[test]
fn a_disk_is_read_as_written() {
    let settings = MemorySettings {
        disk: Some(DiskSettings {
            size_bytes: 8 << 30,
            key: DiskKey([0x5a; 32]),
        }),
        ..settings()
    };
    let text = to_text(&settings).expect("text");
    let disk = format!("<outram:disk size=\"8GiB\" key=\"{}\"/>", "5a".repeat(32));
    assert!(text.contains(&disk), "{text}");
    assert_eq!(read(&domain(&text)).expect("read"), Some(settings));
}

#[test]
fn a_disk_that_cannot_be_is_named() {
    let key = "5a".repeat(32);
    for (disk, expected) in [
        (format!("<o:disk key='{key}'/>"), "has no size"),
        (
            format!("<o:disk size='8XB' key='{key}'/>"),
            "'8XB' is not possible",
        ),
        (
            format!("<o:disk size='1000000' key='{key}'/>"),
            "multiple of 4096",
        ),
        (
            format!("<o:disk size='4KiB' key='{key}'/>"),
            "from 1 MiB to",
        ),
        ("<o:disk size='8GiB'/>".to_owned(), "openssl rand -hex 32"),
        (
            "<o:disk size='8GiB' key='5a'/>".to_owned(),
            "64 hexadecimal digits",
        ),
        (
            format!("<o:disk size='8GiB' key='{key}' bus='x'/>"),
            "'bus'",
        ),
        (
            format!("<o:disk size='8GiB' key='{key}'/>").repeat(2),
            "more than one <outram:disk>",
        ),
    ] {
        let metadata = format!("<o:memory {NS} local-ratio='0.5'>{disk}</o:memory>");
        let error = read(&domain(&metadata)).expect_err("refused").to_string();
        assert!(error.contains(expected), "{disk}: {error}");
        assert!(
            !error.contains(&key),
            "the key stays out of messages: {error}"
        );
    }
}

#[test]
fn any_prefix_and_comments_do() {
    let read = read(&domain(&format!(
        "<o:memory {NS} local-ratio=' 0.5 '><!-- why --> <o:server address='a:1'/> </o:memory>"
    )));
    assert_eq!(read.expect("read").map(|s| s.servers.len()), Some(1));
    let default = "<memory xmlns='https://outram.dev/xmlns/domain/1' local='64 MiB'/>";
    assert!(found_in(default).is_some());
}

fn found_in(metadata: &str) -> Option<MemorySettings> {
    read(&domain(metadata)).expect("read")
}

#[test]
fn other_metadata_is_none_of_ours() {
    for metadata in [
        "",
        "<memory local='1'/>",
        "<x:memory xmlns:x='urn:x' local='1'/>",
    ] {
        assert_eq!(found_in(metadata), None, "{metadata}");
    }
}

#[test]
fn every_mistake_is_told_with_its_cure() {
    let cases: &[(&str, &[&str])] = &[
        ("<o:memory {NS}/>", &["no limit", "local-ratio='0.5'"]),
        (
            "<o:memory {NS} local-ratio='0.5' local='1G'/>",
            &["both", "0.5", "1G", "keep one"],
        ),
        (
            "<o:memory {NS} local-ration='0.5'/>",
            &["local-ration", "'local-ratio'"],
        ),
        ("<o:memory {NS} local-ratio='1.5'/>", &["1.5", "at most 1"]),
        ("<o:memory {NS} local-ratio='NaN'/>", &["NaN", "at most 1"]),
        ("<o:memory {NS} local-ratio='half'/>", &["half", "0.5"]),
        ("<o:memory {NS} local='much'/>", &["much", "512MiB"]),
        (
            "<o:memory {NS} local='99999999T'/>",
            &["99999999T", "too large"],
        ),
        (
            "<o:memory {NS} local='100'/>",
            &["100", "less than one page"],
        ),
        (
            "<o:memry {NS} local='1G'/>",
            &["outram:memry", "outram:memory"],
        ),
        (
            "<o:memory {NS} local='1G'><o:sever address='a:1'/></o:memory>",
            &["outram:sever", "outram:server"],
        ),
        (
            "<o:memory {NS} local='1G'><server address='a:1'/></o:memory>",
            &["<server>", "namespace"],
        ),
        (
            "<o:memory {NS} local='1G'><o:server adress='a:1'/></o:memory>",
            &["adress", "'address'"],
        ),
        (
            "<o:memory {NS} local='1G'><o:server/></o:memory>",
            &["no address", "HOST:PORT"],
        ),
        (
            "<o:memory {NS} local='1G'><o:server address='a:0'/></o:memory>",
            &["'a:0'", "expected host:port"],
        ),
        (
            "<o:memory {NS} local='1G'><o:server address='a:1'/><o:server address='a:1'/></o:memory>",
            &["a:1", "twice"],
        ),
        (
            "<o:memory {NS} local='1G'><o:server address='a:1'><o:x/></o:server></o:memory>",
            &["<x>"],
        ),
        (
            "<o:memory {NS} local='1G'>a:1</o:memory>",
            &["contains text"],
        ),
        ("<o:memory {NS} local='1G' added='all'/>", &["all", "added"]),
        (
            "<o:memory {NS} local='1G'/><o:memory {NS} local='2G'/>",
            &["more than one"],
        ),
        (
            "<o:memory xmlns:o='https://outram.dev/xmlns/domain/2' local='1G'/>",
            &["domain/2", "domain/1"],
        ),
        (
            "<o:memory xmlns:o='http://outram.dev/xmlns/domain/1' local='1G'/>",
            &["http://outram.dev", "https://outram.dev"],
        ),
    ];
    for (metadata, words) in cases {
        let metadata = metadata.replace("{NS}", NS);
        let error = read(&domain(&metadata)).expect_err(&metadata).to_string();
        for word in *words {
            assert!(error.contains(word), "'{error}' must name '{word}'");
        }
    }
}

//! Pages kept by another process, over the plainest of protocols: what a remote page costs at least
//! over this machine's TCP, and where the plain pager keeps its pages.
//!
//! ```text
//! request   0 op u8 (1 read, 2 write)   1 pages u8   2 zero [6]   8 page u64   16 zero [16]   = 32, as
//!           Outram's of one extent; of a write, then the pages
//! reply     0 zero [16]                                                           = 16, as Outram's
//!           of a read, then the pages
//! ```
//!
//! One thread serves one connection after the other; blocking, in order, without checks of what is
//! kept: nothing that could be left out is in it.

use std::io::{self, BufRead, BufReader, BufWriter, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::watched_memory::{PAGE_BYTES, Page};

const REQUEST_BYTES: usize = 32;
const REPLY_BYTES: usize = 16;
const READ: u8 = 1;
const WRITE: u8 = 2;
/// Most pages of a request.
pub const PAGES_MAX: usize = 255;

/// Serves until its standard input ends; prints its address first.
pub fn serve(pages: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening")?;
    println!("{}", listener.local_addr()?);
    std::thread::spawn(|| {
        // Whoever started us has ended.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let mut kept = vec![0; pages * PAGE_BYTES];
    loop {
        let (stream, _) = listener.accept().context("accepting")?;
        serve_one(stream, &mut kept)?;
    }
}

/// Answers a client until it goes.
fn serve_one(stream: TcpStream, kept: &mut [u8]) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::with_capacity(REQUEST_BYTES * 64, stream.try_clone()?);
    let mut writer = BufWriter::with_capacity(64 * (REPLY_BYTES + PAGE_BYTES), stream);
    let mut request = [0; REQUEST_BYTES];
    loop {
        // Replies gather while further requests are here already, as a batch is answered.
        if reader.buffer().len() < REQUEST_BYTES {
            writer.flush()?;
        }
        match reader.read_exact(&mut request) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error).context("reading a request"),
        }
        let page = u64::from_le_bytes(request[8..16].try_into()?) as usize;
        let range = page * PAGE_BYTES..(page + usize::from(request[1])) * PAGE_BYTES;
        let place = kept.get_mut(range).context("a page beyond the store")?;
        match request[0] {
            READ => {
                if place.len() > PAGE_BYTES {
                    // What is large is not copied once more.
                    writer.flush()?;
                    write_both(writer.get_mut(), &[0; REPLY_BYTES], place)?;
                } else {
                    writer.write_all(&[0; REPLY_BYTES])?;
                    writer.write_all(place)?;
                }
            }
            WRITE => {
                reader.read_exact(place).context("reading pages")?;
                writer.write_all(&[0; REPLY_BYTES])?;
            }
            other => bail!("operation {other} is neither read nor write"),
        }
    }
}

/// A page store's process; killed when dropped.
#[derive(Debug)]
pub struct Store {
    child: Child,
    /// Where it listens.
    pub address: String,
}

impl Store {
    /// Starts one for so many pages, by this program, which must know `page-store`.
    pub fn start(program: &Path, pages: usize) -> Result<Self> {
        let mut child = Command::new(program)
            .args(["page-store", "--pages", &pages.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a page store")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let mut store = Self {
            child,
            address: String::new(),
        };
        BufReader::new(stdout).read_line(&mut store.address)?;
        store.address = store.address.trim().to_owned();
        ensure!(!store.address.is_empty(), "the page store said no address");
        Ok(store)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection to a page store.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
}

impl Client {
    /// Connects.
    pub fn connect(address: &str) -> Result<Self> {
        let stream =
            TcpStream::connect(address).with_context(|| format!("page store {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }

    /// Reads one page, sleeping until it is here.
    pub fn read(&mut self, page: usize, into: &mut Page) -> Result<()> {
        self.stream.write_all(&request(READ, page, 1))?;
        self.take(&mut into.0)
    }

    /// A reply and its pages, by as few calls as the socket lets.
    fn take(&mut self, into: &mut [u8]) -> Result<()> {
        let mut reply = [0; REPLY_BYTES];
        let mut pieces = [IoSliceMut::new(&mut reply), IoSliceMut::new(into)];
        let mut rest = &mut pieces[..];
        while rest.iter().any(|piece| !piece.is_empty()) {
            match self.stream.read_vectored(rest) {
                Ok(0) => bail!("the page store has closed the connection"),
                Ok(read) => IoSliceMut::advance_slices(&mut rest, read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("reading pages"),
            }
        }
        Ok(())
    }

    /// Reads as many pages in a row as there is room for, up to [`PAGES_MAX`], by one request.
    pub fn read_run(&mut self, page: usize, into: &mut [u8]) -> Result<()> {
        let pages = into.len() / PAGE_BYTES;
        self.stream.write_all(&request(READ, page, pages))?;
        self.take(into)
    }

    /// Writes these pages in a row by one request, and waits until they are kept.
    pub fn write_run(&mut self, page: usize, from: &[u8]) -> Result<()> {
        let request = request(WRITE, page, from.len() / PAGE_BYTES);
        write_both(&mut self.stream, &request, from).context("writing pages")?;
        self.take(&mut [])
    }

    /// Writes one page and waits until it is kept.
    pub fn write(&mut self, page: usize, from: &Page) -> Result<()> {
        self.write_run(page, &from.0)
    }
}

/// Writes a head and its pages, by as few calls as the socket lets.
fn write_both(to: &mut impl Write, head: &[u8], pages: &[u8]) -> io::Result<()> {
    let mut pieces = [IoSlice::new(head), IoSlice::new(pages)];
    let mut rest = &mut pieces[..];
    while !rest.is_empty() {
        match to.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => IoSlice::advance_slices(&mut rest, sent),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn request(op: u8, page: usize, pages: usize) -> [u8; REQUEST_BYTES] {
    let mut request = [0; REQUEST_BYTES];
    request[0] = op;
    request[1] = u8::try_from(pages).expect("no more than PAGES_MAX");
    request[8..16].copy_from_slice(&(page as u64).to_le_bytes());
    request
}

#[cfg(test)]
pub(super) mod tests {
    use std::thread::{JoinHandle, spawn};

    use super::*;

    /// A client of a store in this process with so many pages, and the store's thread, which ends with it.
    pub(in super::super) fn client_of(pages: usize) -> (Client, JoinHandle<Result<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let server = spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            serve_one(stream, &mut vec![0; pages * PAGE_BYTES])
        });
        (Client::connect(&address).expect("a server"), server)
    }

    #[test]
    fn a_page_comes_back_as_it_was_kept() {
        let (mut client, server) = client_of(4);
        let mut page = Page([7; PAGE_BYTES]);
        client.write(3, &page).expect("kept");
        client.read(0, &mut page).expect("there");
        assert_eq!(page.0, [0; PAGE_BYTES]);
        client.read(3, &mut page).expect("there");
        assert_eq!(page.0, [7; PAGE_BYTES]);
        let run: Vec<u8> = (0..2 * PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        client.write_run(1, &run).expect("kept");
        let mut again = vec![0; 3 * PAGE_BYTES];
        client.read_run(1, &mut again).expect("there");
        assert_eq!(again[..2 * PAGE_BYTES], run);
        assert_eq!(again[2 * PAGE_BYTES..], page.0);
        assert!(client.read(4, &mut page).is_err());
        assert!(server.join().expect("no panic").is_err());
    }

    /// A socket that takes few bytes at a time.
    struct Slow(Vec<u8>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(3);
            self.0.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_a_socket_takes_in_parts_arrives_whole() {
        let mut slow = Slow(Vec::new());
        write_both(&mut slow, b"head", b" and pages").expect("it takes all");
        assert_eq!(slow.0, b"head and pages");
    }
}

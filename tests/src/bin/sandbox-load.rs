//! HTTP/1.1 load for tests: `sandbox-load ADDRESS PATH WORKERS REQUESTS` sends requests until
//! /tmp/stop exists, with REQUESTS requests per connection. Prints each failure, and at the end
//! `ok=N failed=N`. Never retries: the tests look for failures.

use std::{
    env,
    error::Error,
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

const STOP: &str = "/tmp/stop";
/// Only a response that never arrives takes so long.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);
/// Limits the load to about 200 requests per second and worker.
const REQUEST_INTERVAL: Duration = Duration::from_millis(5);

static OK: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);

fn main() {
    let arguments: Vec<String> = env::args().collect();
    let [_, address, path, workers, requests] = &arguments[..] else {
        usage()
    };
    let (Ok(workers), Ok(requests)) = (workers.parse::<u32>(), requests.parse::<u64>()) else {
        usage()
    };
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| work(address, path, requests));
        }
    });
    println!(
        "ok={} failed={}",
        OK.load(Ordering::Relaxed),
        FAILED.load(Ordering::Relaxed)
    );
}

fn usage() -> ! {
    eprintln!("usage: sandbox-load ADDRESS PATH WORKERS REQUESTS");
    std::process::exit(2);
}

fn work(address: &str, path: &str, requests: u64) {
    while !Path::new(STOP).exists() {
        if let Err(error) = connection(address, path, requests) {
            FAILED.fetch_add(1, Ordering::Relaxed);
            println!("failed: {error}");
        }
    }
}

fn connection(address: &str, path: &str, requests: u64) -> Result<(), Box<dyn Error>> {
    let stream = TcpStream::connect(address).map_err(|error| format!("connect: {error}"))?;
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    for _ in 0..requests {
        if Path::new(STOP).exists() {
            return Ok(());
        }
        write!(writer, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n")
            .map_err(|error| format!("write: {error}"))?;
        let close = response(&mut reader).map_err(|error| format!("response: {error}"))?;
        OK.fetch_add(1, Ordering::Relaxed);
        if close {
            return Ok(());
        }
        thread::sleep(REQUEST_INTERVAL);
    }
    Ok(())
}

/// Reads one response with status 200. Returns whether the server closes the connection.
fn response(reader: &mut impl BufRead) -> Result<bool, Box<dyn Error>> {
    let (mut length, mut close, mut code) = (0, false, String::new());
    let mut status = String::new();
    if reader.read_line(&mut status)? == 0 {
        return Err("connection closed".into());
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim_end().to_ascii_lowercase();
        match line.split_once(':') {
            Some(("content-length", value)) => length = value.trim().parse()?,
            Some(("connection", value)) => close = value.trim() == "close",
            Some(("x-mesh-error", value)) => code = value.to_owned(),
            None if line.is_empty() => break,
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    if !status.starts_with("HTTP/1.1 200 ") {
        // A failure is one line.
        let (status, body) = (status.trim_end(), String::from_utf8_lossy(&body));
        return Err(format!("{status}{code} {:?}", body.trim_end()).into());
    }
    Ok(close)
}

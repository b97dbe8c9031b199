//! A server for tests whose protocol is not HTTP, and which speaks first:
//! `sandbox-tcp-server PORT NAME` sends a line with its name to each client, then what it receives.
//! `sandbox-tcp-server PORT` resets each connection when the client sends.

use std::io::{self, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::{env, thread};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().collect();
    let (port, name) = match &arguments[..] {
        [_, port] => (port, None),
        [_, port, name] => (port, Some(name.clone())),
        _ => usage(),
    };
    let Ok(port) = port.parse::<u16>() else {
        usage()
    };
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?;
    for stream in listener.incoming() {
        let (mut stream, name) = (stream?, name.clone());
        thread::spawn(move || {
            // A client that leaves is no error of the server.
            let _ = match name {
                Some(name) => serve(&mut stream, &name),
                // A socket with unread bytes is reset when it is closed.
                None => stream.peek(&mut [0]).map(drop),
            };
        });
    }
    Ok(())
}

fn usage() -> ! {
    eprintln!("usage: sandbox-tcp-server PORT [NAME]");
    std::process::exit(2);
}

fn serve(stream: &mut TcpStream, name: &str) -> io::Result<()> {
    writeln!(stream, "{name}")?;
    io::copy(&mut stream.try_clone()?, stream).map(drop)
}

//! Packet capture for tests: `sandbox-capture INTERFACE FILE` writes the packets of an interface to
//! FILE, prints `ready` once it captures, and exits when /tmp/stop-capture exists. Requires
//! CAP_NET_RAW.

use std::{
    env,
    error::Error,
    fs::File,
    io::{BufWriter, Write},
    os::fd::AsRawFd,
    path::Path,
    process::ExitCode,
};

use nix::{
    errno::Errno,
    net::if_::if_nametoindex,
    sys::{
        socket::{
            AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt,
            socket, sockopt::ReceiveTimeout,
        },
        time::{TimeVal, TimeValLike},
    },
};

const STOP: &str = "/tmp/stop-capture";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    let [_, interface, file] = &arguments[..] else {
        eprintln!("usage: sandbox-capture INTERFACE FILE");
        return ExitCode::from(2);
    };
    match capture(interface, file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandbox-capture: {error}");
            ExitCode::FAILURE
        }
    }
}

fn capture(interface: &str, file: &str) -> Result<(), Box<dyn Error>> {
    let index = if_nametoindex(interface)? as usize;
    let socket = socket(
        AddressFamily::Packet,
        SockType::Raw,
        SockFlag::empty(),
        SockProtocol::EthAll,
    )?;
    setsockopt(&socket, ReceiveTimeout, &TimeVal::milliseconds(100))?;
    let mut out = BufWriter::new(File::create(file)?);
    let mut packet = vec![0; 128 * 1024];
    println!("ready");
    loop {
        // Packets before the stop are already queued: reads them all before it exits.
        let stopped = Path::new(STOP).exists();
        loop {
            match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut packet) {
                Ok((length, from)) if from.is_none_or(|from| from.ifindex() == index) => {
                    out.write_all(&packet[..length])?
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(error) => return Err(error.into()),
            }
            if !stopped && Path::new(STOP).exists() {
                break;
            }
        }
        if stopped {
            out.flush()?;
            return Ok(());
        }
    }
}

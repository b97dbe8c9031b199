//! TCP throughput of one connection with non-HTTP data, counted at the receiver.

use std::{
    io::Write,
    net::{Shutdown, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};

use super::{Tally, Window};
use crate::cases::Payload;

/// Sends bytes to `target`; `arrived` returns the number of bytes received so far.
pub fn stream_bytes<T>(
    target: SocketAddr,
    payload: Payload,
    window: Window,
    arrived: impl Fn() -> u64,
    probe: impl Fn() -> Result<T>,
) -> Result<Tally<T>> {
    let stop = AtomicBool::new(false);
    let stream = TcpStream::connect(target).with_context(|| format!("connect to {target}"))?;
    stream
        .set_write_timeout(Some(Duration::from_secs(5)))
        .context("set a write timeout")?;
    thread::scope(|scope| {
        let writer = scope.spawn(|| write(&stream, &payload.bytes(), &stop));
        thread::sleep(window.warm_up);
        let (before, start, first) = (probe()?, Instant::now(), arrived());
        thread::sleep(window.length);
        let (after, elapsed, count) = (probe()?, start.elapsed(), arrived() - first);
        stop.store(true, Ordering::Relaxed);
        // Unblocks the writer.
        let _ = stream.shutdown(Shutdown::Both);
        writer
            .join()
            .map_err(|_| anyhow!("the writer panicked"))??;
        ensure!(
            count > 0,
            "no bytes arrived in {:.1} s",
            elapsed.as_secs_f64()
        );
        Ok(Tally {
            count,
            elapsed,
            before,
            after,
        })
    })
}

fn write(mut stream: &TcpStream, chunk: &[u8], stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        if let Err(error) = stream.write_all(chunk)
            && !stop.load(Ordering::Relaxed)
        {
            return Err(error).context("send bytes");
        }
    }
    Ok(())
}

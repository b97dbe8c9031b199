//! `mesh dashboard` as a process, and what it tells its page.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cluster::wait_for;

/// A running `mesh dashboard`. Dropping it ends the process.
pub struct Dashboard {
    process: Child,
    host: String,
    token: String,
}

impl Dashboard {
    /// Starts `mesh dashboard` by a command without its last arguments.
    pub fn start(mut command: Command) -> Result<Self> {
        command.arg("--no-open").stdout(Stdio::piped());
        let mut started = Self {
            process: command.spawn().context("cannot start mesh dashboard")?,
            host: String::new(),
            token: String::new(),
        };
        let output = started.process.stdout.take().context("it is piped")?;
        let mut url = String::new();
        BufReader::new(output).read_line(&mut url)?;
        let parts = url.trim().strip_prefix("http://");
        let parts = parts.and_then(|rest| rest.split_once("/#token="));
        let (host, token) = parts.with_context(|| format!("no URL: {url:?}"))?;
        (started.host, started.token) = (host.to_owned(), token.to_owned());
        Ok(started)
    }

    /// Waits until the page has exactly these Services with workloads of other names.
    pub fn expect_services(&self, expected: &Value) -> Result<()> {
        wait_for("the workloads of Services", || {
            let traffic = self.traffic()?;
            ensure!(traffic["services"] == *expected, "{traffic:#}");
            Ok(Some(()))
        })
    }

    /// What the page shows.
    fn traffic(&self) -> Result<Value> {
        let Self { host, token, .. } = self;
        let mut stream = TcpStream::connect(host)?;
        write!(
            stream,
            "GET /api/traffic HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        )?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        let parts = response.split_once("\r\n\r\n");
        let (head, body) = parts.context("the response has an end")?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "{response}");
        serde_json::from_str(body).with_context(|| format!("the body is JSON: {body}"))
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

//! `mesh dashboard` as a process, and what it tells its page.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use diy_mesh_testkit::process::Process;
use serde_json::Value;

use crate::cluster::wait_for;

/// A running `mesh dashboard`. Dropping it ends the process.
pub struct Dashboard {
    _process: Process,
    host: String,
    token: String,
}

impl Dashboard {
    /// Starts `mesh dashboard` by a command without its last arguments.
    pub fn start(mut command: Command) -> Result<Self> {
        let process = Process::with_stdout(command.arg("--no-open"));
        let url = process.lines().next().unwrap_or_default();
        let parts = url.strip_prefix("http://");
        let parts = parts.and_then(|rest| rest.split_once("/#token="));
        let (host, token) = parts.with_context(|| format!("no URL: {url:?}"))?;
        let (host, token) = (host.to_owned(), token.to_owned());
        Ok(Self {
            _process: process,
            host,
            token,
        })
    }

    /// Waits until the page has exactly these Services with workloads of other names.
    pub fn expect_services(&self, expected: &Value) -> Result<()> {
        wait_for("the workloads of Services", || {
            let traffic = self.traffic()?;
            ensure!(traffic["services"] == *expected, "{traffic:#}");
            Ok(Some(()))
        })
    }

    /// The traffic on the page.
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

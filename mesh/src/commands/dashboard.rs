//! `mesh dashboard`: serves the page of the mesh on loopback until it is interrupted. Changes nothing.

use std::{
    io::Write,
    net::{Ipv4Addr, Ipv6Addr},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use aws_lc_rs::rand;
use clap::Args;
use diy_mesh_runtime::listen;
use futures::future::{OptionFuture, join};
use tempfile::NamedTempFile;

use crate::terminal;
use crate::{
    dashboard::{Server, guard::Guard, live::Live},
    sample,
};

/// The arguments of `mesh dashboard`.
#[derive(Args, Debug)]
#[command(
    after_help = "The page is served on loopback, to requests with the token of the printed URL. It asks the controller \
    and the proxies with the rights of your kubeconfig, once a second while it is visible. Ends with Ctrl-C.\n\n\
    Examples:\n  mesh dashboard\n  mesh dashboard -n shop               one namespace, whose proxies report each second\n  mesh dashboard --demo                the demo on this machine\n  \
    mesh dashboard --no-open --port 4100"
)]
pub struct Arguments {
    /// Port on loopback [default: a free one]
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        hide_default_value = true
    )]
    port: u16,
    /// Only print the URL, without opening it in the browser
    #[arg(long)]
    no_open: bool,
    #[command(flatten)]
    from: sample::Arguments,
}

/// Runs the command until it is interrupted.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let namespace = arguments.from.namespace();
    let sampler = arguments.from.sampler(namespace, true).await?;
    let proxies = sampler.proxies().cloned();
    let proxies = proxies.context("proxies are asked in a cluster: name one, not --controller")?;
    let address = (Ipv4Addr::LOCALHOST, arguments.port).into();
    let listener = listen::bind(address).await;
    let listener = listener.with_context(|| format!("failed to listen on {address}"))?;
    let port = listener.local_addr()?.port();
    // Hosts without IPv6 have no such address. The URL has the address of IPv4.
    let second = listen::bind((Ipv6Addr::LOCALHOST, port).into()).await.ok();
    let token = token()?;
    let url = format!("http://127.0.0.1:{port}/#token={token}");
    terminal::print(&format!("{url}\n"))?;
    let opened = (!arguments.no_open).then(|| open(&url)).transpose();
    if let Err(error) = &opened {
        terminal::note(&format!("mesh: {error:#}; open the URL yourself"));
    }
    let live = Live {
        sampler: sampler.into(),
        proxies,
    };
    let server = Server::new(live, Guard { port, token });
    let second = OptionFuture::from(second.map(|listener| server.serve(listener)));
    tokio::select! {
        _ = join(server.serve(listener), second) => Ok(()),
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
    }
}

fn token() -> Result<String> {
    let mut random = [0; 16];
    rand::fill(&mut random).context("failed to generate random bytes")?;
    Ok(format!("{:032x}", u128::from_be_bytes(random)))
}

/// Opens a page in the browser that leads to the URL. All users of the machine see the arguments of
/// processes, but only this user can read the file, which exists until the command ends.
fn open(url: &str) -> Result<NamedTempFile> {
    let mut page = tempfile::Builder::new().suffix(".html").tempfile()?;
    write!(
        page,
        "<!doctype html><meta http-equiv=\"refresh\" content=\"0;url={url}\">"
    )?;
    let program = if cfg!(target_os = "macos") {
        "open"
    } else {
        "xdg-open"
    };
    let mut command = Command::new(program);
    command.arg(page.path());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
        .spawn()
        .with_context(|| format!("failed to start {program}"))?;
    Ok(page)
}

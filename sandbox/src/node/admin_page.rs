//! Pages of the admin server of a pod's proxy, read from the pod's loopback interface, where the
//! port-forwards of a cluster arrive.

use std::{
    fs::{self, File},
    net::{self, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use diy_mesh_injector::containers::ADMIN_PORT_FLAG;
use nix::sched::{CloneFlags, setns};
use tokio::{net::TcpStream, time};

use super::network::on_own_thread;
use crate::{
    exec::Spec,
    page::{self, Page},
};

/// The time for a page.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Reads a page of the proxy whose container has this directory.
pub(super) async fn admin_page(container: PathBuf, path: String) -> Result<Page> {
    let read = async {
        let text = fs::read(container.join("spec.json")).context("the pod has no proxy yet")?;
        let spec: Spec = serde_json::from_slice(&text)?;
        let port = admin_port(&spec.argv).context("its proxy has no admin port")?;
        let stream = on_own_thread("admin-page", move || connect(&spec.network, port)).await?;
        stream.set_nonblocking(true)?;
        Ok(page::read(TcpStream::from_std(stream)?, &path).await?)
    };
    let read = time::timeout(TIMEOUT, read).await;
    read.unwrap_or_else(|_| anyhow::bail!("timed out after {} s", TIMEOUT.as_secs()))
}

fn admin_port(argv: &[String]) -> Option<u16> {
    let mut values = argv
        .iter()
        .filter_map(|argument| argument.strip_prefix(ADMIN_PORT_FLAG)?.strip_prefix('='));
    values.next()?.parse().ok()
}

fn connect(network: &Path, port: u16) -> Result<net::TcpStream> {
    let network = File::open(network).context("failed to open the pod's network namespace")?;
    setns(network, CloneFlags::CLONE_NEWNET).context("failed to enter the network namespace")?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = net::TcpStream::connect_timeout(&address, TIMEOUT);
    stream.with_context(|| format!("failed to connect to {address} in the pod"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_is_that_of_the_flag() {
        let argv = ["/proxy", "--admin-port-file=x", "--admin-port=4001"].map(str::to_owned);
        assert_eq!(admin_port(&argv), Some(4001));
        assert_eq!(admin_port(&argv[..2]), None);
        assert_eq!(admin_port(&["--admin-port=65536".to_owned()]), None);
    }
}

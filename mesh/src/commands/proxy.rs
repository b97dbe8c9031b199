//! `mesh proxy`: what is in force in the proxy of one pod. Changes nothing.

mod page;

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;

use crate::{proxies, terminal};

/// The arguments of `mesh proxy`.
#[derive(Args, Debug)]
#[command(
    after_help = "The proxy is asked by port-forward; this needs the right pods/portforward in its namespace, and no \
    controller. Each worker of the proxy has its own connections and judges endpoints itself.\n\n\
    Exit codes: 0 the proxy responded, 2 error.\n\n\
    Examples:\n  mesh proxy shop/web-1\n  mesh proxy shop/web-1 --destination shop/cart\n  \
    mesh proxy shop/web-1 -o json | jq .certificate.not_after"
)]
pub struct Arguments {
    /// [NAMESPACE/]NAME of a pod, or of its workload: one of its pods
    #[arg(value_name = "POD")]
    pod: String,
    /// Only this destination: [NAMESPACE/]NAME of its Service or pod, NAMESPACE/NAME:PORT of the
    /// backend of a route, or ADDRESS:PORT
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    #[command(flatten)]
    of: proxies::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: terminal::Output,
}

/// Runs the command.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let proxies = arguments.of.connect().await?;
    let name = proxies.full_name(&arguments.pod);
    let mut pods = proxies.named(&name).await?;
    // The pod of this name comes before the pods of a workload.
    pods.sort_by_key(|pod| pod.full_name() != name);
    let query = arguments.destination.as_ref().map(|name| {
        let is_address = name.parse::<SocketAddr>().is_ok();
        let full_name = (!is_address).then(|| proxies.full_name(name));
        format!("destination={}", full_name.as_ref().unwrap_or(name))
    });
    let query = query.unwrap_or_default();
    let state = proxies.state(&pods[0], &query).await?;
    let output = arguments.output;
    output.print(&state, |colors| page::page(&state, colors))
}

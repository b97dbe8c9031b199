//! `mesh why`: why an exchange did what it did, from the records of its two proxies. Changes nothing.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use diy_mesh_model::exchange::{Exchange, ExchangeId};

use super::terminal::{self, printable};
use crate::{
    proxies::{self, Proxies},
    why::Story,
};

/// The arguments of `mesh why`.
#[derive(Args, Debug)]
#[command(
    after_help = "The proxies of both pods are asked by port-forward; this needs the right pods/portforward in \
    their namespaces, and no controller. A proxy keeps its latest 256 failures and 256 other exchanges.\n\n\
    Exit codes: 0 the exchange did not fail, 1 it failed, 2 error, 3 no proxy knows such an exchange.\n\n\
    Examples:\n  mesh why 10.244.1.7-5f3a9c210b44   the exchange that a response names in x-mesh-exchange\n  \
    mesh why shop/web shop/cart        the latest failure from a workload or pod to a Service\n  \
    mesh why -n shop web cart          the same\n  \
    mesh why --demo 10.244.0.7-5f3a9c210b44   an exchange that `mesh demo` shows"
)]
pub struct Arguments {
    /// Identifier of an exchange, or the caller: [NAMESPACE/]NAME of a pod, or of its workload
    #[arg(value_name = "ID|FROM")]
    exchange: String,
    /// [NAMESPACE/]NAME of the Service or pod that it called
    #[arg(value_name = "TO")]
    to: Option<String>,
    #[command(flatten)]
    of: proxies::Arguments,
}

/// The command that explains an exchange.
pub fn command(id: ExchangeId, demo: bool) -> String {
    let demo = if demo { "--demo " } else { "" };
    format!("mesh why {demo}{id}")
}

/// Runs the command.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let story = story(arguments).await?;
    let is_known = story.caller.is_some() || story.callee.is_some();
    terminal::print(&printable_lines(&story.page()))?;
    Ok(match () {
        () if !is_known => ExitCode::from(3),
        () if story.is_failure() => ExitCode::FAILURE,
        () => ExitCode::SUCCESS,
    })
}

/// The records come from proxies, which may be hostile.
pub(super) fn printable_lines(page: &str) -> String {
    page.lines().map(|line| printable(line) + "\n").collect()
}

async fn story(arguments: &Arguments) -> Result<Story> {
    let called = match (&arguments.to, arguments.exchange.parse::<ExchangeId>()) {
        (None, Err(error)) => {
            bail!("{error}; or name the caller and the called Service: mesh why FROM TO")
        }
        (to, id) => to.as_deref().ok_or(id.ok()),
    };
    let proxies = arguments.of.connect().await?;
    match called {
        Err(id) => Ok(proxies.story(id.expect("it was parsed")).await?),
        Ok(to) => latest(&proxies, &arguments.exchange, to).await,
    }
}

/// The story of the latest failure from a pod or workload to a Service, or of the latest exchange.
async fn latest(proxies: &Proxies, from: &str, to: &str) -> Result<Story> {
    let [from, to] = [from, to].map(|name| proxies.full_name(name));
    let found = proxies
        .latest(&from, |one: &Exchange| one.is_to(&to))
        .await?;
    let missing = || format!("No proxy of {from} knows a recent exchange to {to}.");
    Ok(found.unwrap_or_else(|| Story {
        missing: vec![missing()],
        ..Story::default()
    }))
}

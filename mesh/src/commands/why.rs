//! `mesh why`: why an exchange did what it did, from the records of its two proxies. Changes nothing.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use diy_mesh_model::exchange::{Exchange, ExchangeId};

use crate::terminal::{self, printable};
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
    mesh why shop/web api.example.com  the latest failure to a host outside of the cluster\n  \
    mesh why --demo 10.244.0.7-5f3a9c210b44   an exchange that `mesh demo` shows"
)]
pub struct Arguments {
    /// Identifier of an exchange, or the caller: [NAMESPACE/]NAME of a pod, or of its workload
    #[arg(value_name = "ID|FROM")]
    exchange: String,
    /// [NAMESPACE/]NAME of the Service or pod that it called, or HOST[:PORT] outside of the cluster
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

/// The destination of an exchange.
#[derive(Debug, PartialEq, Eq)]
enum To {
    /// The names of a Service or pod, and of the pods of a headless Service.
    Names(BTreeSet<String>),
    /// A host outside of the cluster, and a port.
    Host(String, Option<u16>),
}

impl To {
    /// The host in a text. `None`: it is a name of the cluster.
    fn host(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Some(Self::Host(address.ip().to_string(), Some(address.port())));
        }
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Some(Self::Host(ip.to_string(), None));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (text, None),
        };
        let is_host = !host.contains('/') && host.contains('.');
        is_host.then(|| Self::Host(host.to_owned(), port))
    }

    fn is_of(&self, exchange: &Exchange) -> bool {
        match self {
            Self::Names(names) => names.iter().any(|name| exchange.is_to(name)),
            Self::Host(host, port) => exchange.is_to_host(host, *port),
        }
    }
}

/// The story of the latest failure from a pod or workload to a Service or to a host outside of the
/// cluster, or of the latest exchange.
async fn latest(proxies: &Proxies, from: &str, to: &str) -> Result<Story> {
    let from = proxies.full_name(from);
    let (name, called) = match To::host(to) {
        Some(host) => (to.to_owned(), host),
        None => {
            let name = proxies.full_name(to);
            let mut names = proxies.pods_of_headless(&name).await;
            names.insert(name.clone());
            (name, To::Names(names))
        }
    };
    let found = proxies.latest(&from, |one| called.is_of(one)).await?;
    let missing = || format!("No proxy of {from} knows a recent exchange to {name}.");
    Ok(found.unwrap_or_else(|| Story {
        missing: vec![missing()],
        ..Story::default()
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn hosts_outside_are_found_by_address_by_host_and_in_denials() {
        let host = |name: &str, port| Some(To::Host(name.to_owned(), port));
        assert_eq!(
            To::host("api.example.com:443"),
            host("api.example.com", Some(443))
        );
        assert_eq!(To::host("api.example.com"), host("api.example.com", None));
        assert_eq!(
            To::host("[2001:db8::1]:443"),
            host("2001:db8::1", Some(443))
        );
        for name in ["cart", "shop/cart", "shop/v1.cart", "cart:80"] {
            assert_eq!(To::host(name), None, "{name}");
        }
        let exchange = |request, failure| -> Exchange {
            let exchange = json!({
                "time": "1970-01-01T00:01:00.5Z", "direction": "outbound", "peer": "10.0.0.1:1",
                "destination": "192.0.2.1:443", "protocol": "http1", "duration_ms": 1.0,
                "request": request, "failure": failure,
            });
            serde_json::from_value(exchange).expect("an exchange")
        };
        let sent = exchange(
            json!({"start_line": "GET / HTTP/1.1", "headers": [["Host", "API.example.com:443"]], "body_bytes": 0}),
            json!(null),
        );
        let denied = json!({"code": "denied", "message": "api.example.com:443 is not allowed"});
        let denied = exchange(json!(null), denied);
        let other = exchange(json!(null), json!(null));
        let matches = |to: &str| {
            let to = To::host(to).expect("a host");
            [&sent, &denied, &other].map(|one| to.is_of(one))
        };
        assert_eq!(matches("api.example.com"), [true, true, false]);
        assert_eq!(matches("api.example.com:443"), [true, true, false]);
        assert_eq!(matches("api.example.com:80"), [false; 3]);
        assert_eq!(matches("example.com"), [false; 3]);
        assert_eq!(matches("192.0.2.1:443"), [true; 3]);
    }
}

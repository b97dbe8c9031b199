//! `mesh tap`: the exchanges of pods as they end. The proxies are asked each second; the traffic does
//! not notice. Changes nothing.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use diy_mesh_model::exchange::{Direction, Exchange, Recent};
use futures::future::join_all;

use super::why;
use crate::proxies;
use crate::terminal::{self, printable};
use crate::why::peer;

/// The time between two questions to a proxy.
const INTERVAL: Duration = Duration::from_secs(1);

/// The arguments of `mesh tap`.
#[derive(Args, Debug)]
#[command(
    after_help = "The proxies are asked by port-forward each second; this needs the right pods/portforward in their \
    namespace, and no controller. A proxy keeps its latest 256 failures and 256 other exchanges: more of them in \
    one second are counted only. Ends with Ctrl-C.\n\n\
    Examples:\n  mesh tap shop/web                     all pods of a workload\n  \
    mesh tap shop/web --failures          what failed\n  \
    mesh tap shop/web-1 --path /cart -o json | jq .duration_ms"
)]
pub struct Arguments {
    /// [NAMESPACE/]NAME of a pod, or of its workload
    #[arg(value_name = "POD")]
    pod: String,
    /// Only failures
    #[arg(long)]
    failures: bool,
    /// Only paths that begin so
    #[arg(long, value_name = "PREFIX")]
    path: Option<String>,
    /// Only statuses that begin so, such as 5 or 404
    #[arg(long, value_name = "DIGITS")]
    status: Option<String>,
    /// Only inbound exchanges of callers whose identity or address contains this
    #[arg(long, value_name = "TEXT")]
    caller: Option<String>,
    /// Only exchanges that took longer, in milliseconds
    #[arg(long, value_name = "MS")]
    slower_than: Option<f64>,
    #[command(flatten)]
    of: proxies::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: terminal::Output,
}

/// Runs the command until it is interrupted, or until the reader of standard output exits.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let proxies = arguments.of.connect().await?;
    let pods = proxies.named(&proxies.full_name(&arguments.pod)).await?;
    let mut tapped: Vec<_> = pods.into_iter().map(|pod| (pod, u64::MAX)).collect();
    terminal::note(&format!("exchanges of {} pods; Ctrl-C ends", tapped.len()));
    while !tapped.is_empty() {
        let asked = tapped.iter().map(async |(pod, after)| {
            let recent = proxies.recent(pod, &format!("after={after}")).await;
            recent.map(|recent| (pod.clone(), *after, recent))
        });
        let asked = join_all(asked).await;
        tapped.clear();
        for recent in asked {
            match recent {
                Ok((pod, after, recent)) => {
                    arguments.print(after, &recent)?;
                    tapped.push((pod, recent.ended));
                }
                Err(error) => terminal::note(&format!("mesh: {error}")),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            interrupted = tokio::signal::ctrl_c() => return Ok(interrupted?),
        }
    }
    bail!("no proxy is left")
}

impl Arguments {
    fn selects(&self, exchange: &Exchange) -> bool {
        let begins = |text: Option<&str>, prefix: &Option<String>| match prefix {
            Some(prefix) => text.is_some_and(|text| text.starts_with(prefix.as_str())),
            None => true,
        };
        let is_caller = |caller: &String| {
            let identity = exchange.identity.as_ref();
            exchange.direction == Direction::Inbound
                && (identity.is_some_and(|identity| identity.contains(caller))
                    || exchange.peer.to_string().contains(caller))
        };
        (!self.failures || exchange.is_failure())
            && begins(exchange.path(), &self.path)
            && begins(exchange.status().as_deref(), &self.status)
            && self.caller.as_ref().is_none_or(is_caller)
            && self
                .slower_than
                .is_none_or(|limit| exchange.duration_ms > limit)
    }

    /// Prints what ended after so many others, and how many are not known any more.
    fn print(&self, after: u64, recent: &Recent) -> Result<()> {
        for exchange in recent.exchanges.iter().filter(|one| self.selects(one)) {
            terminal::write(&self.line(exchange)?)?;
        }
        let missed = recent.ended.saturating_sub(after);
        match missed.saturating_sub(recent.exchanges.len() as u64) {
            0 => {}
            missed => terminal::note(&format!("[{missed} more exchanges went by]")),
        }
        Ok(())
    }

    fn line(&self, exchange: &Exchange) -> Result<String> {
        Ok(match self.output {
            terminal::Output::Json => terminal::json(&serde_json::to_string(exchange)?),
            terminal::Output::Text => printable(&line(exchange, self.of.demo)) + "\n",
        })
    }
}

fn line(exchange: &Exchange, demo: bool) -> String {
    let preposition = match exchange.direction {
        Direction::Inbound => "from",
        Direction::Outbound => "to",
    };
    let other = format!("{preposition} {}", peer(exchange));
    let status = exchange.status().unwrap_or_else(|| "-".into());
    let (time, subject, ms) = (&exchange.time, exchange.subject(), exchange.duration_ms);
    let direction = exchange.direction.name();
    let mut line = format!("{time} {direction:<8} {subject} {status} {ms:.3} ms {other}");
    if let Some(code) = exchange.code() {
        line += &format!(" [{code}]");
    }
    match exchange.id.filter(|_| exchange.is_failure()) {
        Some(id) => line + "  " + &why::command(id, demo),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::parsed;
    use serde_json::json;

    fn exchange(direction: &str, status: u16) -> Exchange {
        serde_json::from_value(json!({
            "time": "2026-11-27T17:00:01.123Z", "direction": direction, "peer": "10.244.1.7:40000",
            "destination": "10.96.0.7:80", "protocol": "http1", "duration_ms": 3.5,
            "id": "10.244.1.7-5f3a9c210b44", "service": "shop/cart", "attempts": [],
            "identity": "spiffe://cluster.local/ns/shop/sa/web",
            "request": {"start_line": "GET /cart", "headers": [], "body_bytes": 0},
            "response": {"start_line": format!("HTTP/1.1 {status}"), "headers": [], "body_bytes": 0},
        }))
        .expect("an exchange")
    }

    #[test]
    fn filters_select_exchanges() {
        let (failed, inbound) = (exchange("outbound", 503), exchange("inbound", 200));
        for (line, expected) in [
            ("mesh shop/web", [true, true]),
            ("mesh shop/web --failures", [true, false]),
            ("mesh shop/web --status 5", [true, false]),
            ("mesh shop/web --status 404", [false, false]),
            ("mesh shop/web --path /ca", [true, true]),
            ("mesh shop/web --path /a", [false, false]),
            ("mesh shop/web --caller sa/web", [false, true]),
            ("mesh shop/web --caller 10.244.1.7", [false, true]),
            ("mesh shop/web --slower-than 3", [true, true]),
            ("mesh shop/web --slower-than 4", [false, false]),
        ] {
            let arguments: Arguments = parsed(line).expect("it is valid");
            let selected = [&failed, &inbound].map(|one| arguments.selects(one));
            assert_eq!(selected, expected, "{line}");
        }
    }

    #[test]
    fn line_of_a_failure_names_mesh_why() {
        assert_eq!(
            line(&exchange("outbound", 503), false),
            "2026-11-27T17:00:01.123Z outbound GET /cart 503 3.500 ms to shop/cart  \
             mesh why 10.244.1.7-5f3a9c210b44"
        );
        assert_eq!(
            line(&exchange("inbound", 200), false),
            "2026-11-27T17:00:01.123Z inbound  GET /cart 200 3.500 ms from \
             spiffe://cluster.local/ns/shop/sa/web"
        );
        let mut denied = exchange("outbound", 403);
        let response = denied.response.as_mut().expect("a response");
        response.headers = vec![("x-mesh-error".into(), "denied".into())];
        let denied = line(&denied, false);
        assert!(
            denied.ends_with("to shop/cart [denied]  mesh why 10.244.1.7-5f3a9c210b44"),
            "{denied}"
        );
        let of_demo = line(&exchange("outbound", 503), true);
        assert!(of_demo.ends_with("  mesh why --demo 10.244.1.7-5f3a9c210b44"));
    }
}

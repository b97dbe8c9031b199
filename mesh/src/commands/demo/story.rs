//! From the lines of the containers to exchanges: joins the dumps of the two proxies of an exchange
//! and the output of the two applications. Pure: the caller passes the time.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use diy_mesh_model::exchange::{self, Direction, Dump, Part};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::names::{Names, Party};
use diy_mesh_sandbox::protocol::{LogLine, PodView, Source};

/// The container of the proxy, and the one that sets the redirect rules.
pub const PROXY_CONTAINERS: [&str; 2] = ["proxy", "proxy-init"];
/// The time in which silent applications print what belongs to an exchange.
const SETTLE_TIME: Duration = Duration::from_millis(250);
/// The time in which the other proxy of an exchange prints its dump, and applications print what
/// belongs to it, on a slow machine too.
const PARTNER_TIMEOUT: Duration = Duration::from_secs(5);
/// The time in which an exchange follows the output of the application about it.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10);
/// The end of a burst of lines.
const QUIET_TIME: Duration = Duration::from_millis(30);
/// The first words of what the sample applications print about an exchange.
const BLOCK_STARTS: [&str; 3] = ["Request #", "Response #", "Request failed"];

/// Something to print.
#[derive(Debug)]
pub enum Item {
    /// An exchange, with all that its pods have printed about it.
    Exchange(Box<Exchange>),
    /// Consecutive lines of a container.
    Output(Output),
}

/// Consecutive lines of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The container.
    pub source: Source,
    /// The lines.
    pub lines: Vec<String>,
}

/// An exchange as the proxies saw it. At least one proxy has dumped it.
#[derive(Debug, Default)]
pub struct Exchange {
    /// The dump of the caller's proxy.
    pub outbound: Option<ProxyDump>,
    /// The dump of the callee's proxy.
    pub inbound: Option<ProxyDump>,
    /// The output of the calling application.
    pub caller_output: Option<Output>,
    /// The output of the called application.
    pub callee_output: Option<Output>,
}

/// A dump and its origin.
#[derive(Debug)]
pub struct ProxyDump {
    /// The container.
    pub source: Source,
    /// The dump.
    pub dump: Box<exchange::Exchange>,
    /// The line that the proxy wrote.
    pub line: String,
}

/// Collects lines until exchanges are complete.
#[derive(Default)]
pub struct Story {
    /// The names of the pods.
    pub names: Names,
    pods: BTreeMap<IpAddr, PodView>,
    exchanges: Vec<Pending<Exchange>>,
    outputs: Vec<Pending<Output>>,
    /// The namespaces and names of pods whose applications print nothing about exchanges.
    silent: BTreeSet<(String, String)>,
}

struct Pending<T> {
    value: T,
    /// The time of the first and of the last line.
    began: Instant,
    updated: Instant,
}

impl<T> Pending<T> {
    fn new(value: T, now: Instant) -> Self {
        Self {
            value,
            began: now,
            updated: now,
        }
    }
}

impl Exchange {
    /// The dump with the most information: the caller's, if there is one.
    pub fn dump(&self) -> Option<&exchange::Exchange> {
        let dumped = self.outbound.as_ref().or(self.inbound.as_ref());
        dumped.map(|proxy| &*proxy.dump)
    }

    /// Whether both proxies use mutual TLS.
    pub fn is_mutual_tls(&self) -> bool {
        self.dumps().any(|dump| dump.identity.is_some())
    }

    /// Whether it failed at one of the proxies: the caller's sees an error of the callee's as a
    /// response.
    pub fn is_failure(&self) -> bool {
        self.dumps().any(exchange::Exchange::is_failure)
    }

    fn dumps(&self) -> impl Iterator<Item = &exchange::Exchange> {
        let proxies = [&self.inbound, &self.outbound].into_iter().flatten();
        proxies.map(|proxy| &*proxy.dump)
    }
}

impl Story {
    /// Records the names and the address of a pod.
    pub fn record_pod(&mut self, pod: &PodView) {
        self.names.record(pod);
        if let Some(address) = pod.ip.as_ref().and_then(|ip| ip.parse().ok()) {
            self.pods.insert(address, pod.clone());
        }
    }

    /// The caller and the callee of an exchange.
    pub fn parties(&self, exchange: &Exchange) -> Option<[Party; 2]> {
        let dump = exchange.dump()?;
        let party = |proxy: &Option<ProxyDump>, address: SocketAddr| {
            if let Some(ProxyDump { source, .. }) = proxy {
                return self
                    .names
                    .party(&source.namespace, &source.pod, &source.workload);
            }
            match self.pods.get(&address.ip()) {
                Some(pod) => self.names.party(&pod.namespace, &pod.name, &pod.workload),
                None => Party {
                    name: address.to_string(),
                    workload: address.ip().to_string(),
                    color_code: None,
                },
            }
        };
        let callee = dump.endpoint.unwrap_or(dump.destination);
        Some([
            party(&exchange.outbound, dump.peer),
            party(&exchange.inbound, callee),
        ])
    }

    /// Records a line of a container.
    pub fn record_line(&mut self, LogLine { source, line }: LogLine, now: Instant) {
        let is_proxy = source.container == PROXY_CONTAINERS[0];
        match is_proxy.then(|| serde_json::from_str(&line).ok()).flatten() {
            Some(Dump::Exchange(dump)) => {
                self.record_dump(ProxyDump { source, dump, line }, now);
            }
            Some(suppressed) => {
                let line = suppressed.text().trim_end().to_owned();
                self.record_output(source, line, now);
            }
            None => self.record_output(source, line, now),
        }
    }

    fn record_dump(&mut self, proxy: ProxyDump, now: Instant) {
        let is_partner = |pending: &&mut Pending<Exchange>| {
            let Exchange {
                outbound, inbound, ..
            } = &pending.value;
            match (proxy.dump.direction, outbound, inbound) {
                (Direction::Inbound, Some(other), None) => contains(&other.dump, &proxy.dump),
                (Direction::Outbound, None, Some(other)) => contains(&proxy.dump, &other.dump),
                _ => false,
            }
        };
        let exchange = match self.exchanges.iter_mut().find(is_partner) {
            Some(pending) => {
                pending.updated = now;
                &mut pending.value
            }
            None => {
                let pending = Pending::new(Exchange::default(), now);
                self.exchanges.push(pending);
                &mut self.exchanges.last_mut().expect("it was added").value
            }
        };
        match proxy.dump.direction {
            Direction::Inbound => exchange.inbound = Some(proxy),
            Direction::Outbound => exchange.outbound = Some(proxy),
        }
    }

    fn record_output(&mut self, source: Source, line: String, now: Instant) {
        if starts_block(&line) {
            self.silent.remove(&pod_of(&source));
        }
        let last = self.outputs.iter_mut().rev();
        let mut last = last.filter(|pending| pending.value.source == source);
        match last.next() {
            Some(pending) if !starts_block(&line) && pending.updated + QUIET_TIME > now => {
                pending.value.lines.push(line);
                pending.updated = now;
            }
            _ => {
                let lines = vec![line];
                let output = Output { source, lines };
                self.outputs.push(Pending::new(output, now));
            }
        }
    }

    /// Takes everything that is complete, in order.
    pub fn take_complete(&mut self, now: Instant) -> Vec<Item> {
        self.take(|deadline| deadline <= now)
    }

    /// Takes everything.
    pub fn take_all(&mut self) -> Vec<Item> {
        self.take(|_| true)
    }

    /// The earliest time at which something may be complete.
    pub fn next_deadline(&self) -> Option<Instant> {
        let exchanges = self
            .exchanges
            .iter()
            .map(|pending| self.settles_at(pending));
        exchanges.chain(self.outputs.iter().map(ends_at)).min()
    }

    fn take(&mut self, is_due: impl Fn(Instant) -> bool) -> Vec<Item> {
        let (due, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.exchanges)
            .into_iter()
            .partition(|pending| is_due(self.settles_at(pending)));
        self.exchanges = waiting;
        let mut items: Vec<(Instant, Item)> = due
            .into_iter()
            .map(|pending| {
                let mut exchange = pending.value;
                let began = pending.began;
                exchange.caller_output = self.take_output(exchange.outbound.as_ref(), began);
                exchange.callee_output = self.take_output(exchange.inbound.as_ref(), began);
                self.record_silence(exchange.outbound.as_ref(), &exchange.caller_output);
                self.record_silence(exchange.inbound.as_ref(), &exchange.callee_output);
                (pending.began, Item::Exchange(Box::new(exchange)))
            })
            .collect();
        let due = self
            .outputs
            .extract_if(.., |pending| is_due(ends_at(pending)));
        items.extend(due.map(|pending| (pending.began, Item::Output(pending.value))));
        items.sort_by_key(|(began, _)| *began);
        items.into_iter().map(|(_, item)| item).collect()
    }

    /// The next exchanges of a pod whose application has printed nothing do not wait for it.
    fn record_silence(&mut self, proxy: Option<&ProxyDump>, output: &Option<Output>) {
        if let (Some(proxy), None) = (proxy, output) {
            self.silent.insert(pod_of(&proxy.source));
        }
    }

    /// When an exchange is complete, or is printed without its other side.
    fn settles_at(&self, pending: &Pending<Exchange>) -> Instant {
        let has_proxy = |address| self.pods.get(&address).is_some_and(|pod| pod.injected);
        let lacks_partner = match &pending.value {
            Exchange {
                outbound: Some(proxy),
                inbound: None,
                ..
            } => {
                let endpoint = proxy.dump.endpoint.unwrap_or(proxy.dump.destination);
                proxy.dump.failure.is_none() && has_proxy(endpoint.ip())
            }
            Exchange {
                outbound: None,
                inbound: Some(proxy),
                ..
            } => has_proxy(proxy.dump.peer.ip()),
            _ => false,
        };
        let proxies = [&pending.value.outbound, &pending.value.inbound];
        let lacks_output = proxies.into_iter().flatten().any(|proxy| {
            let prints = !self.silent.contains(&pod_of(&proxy.source));
            prints && self.find_output(proxy, pending.began).is_none()
        });
        pending.updated
            + if lacks_partner || lacks_output {
                PARTNER_TIMEOUT
            } else {
                SETTLE_TIME
            }
    }

    /// The output of the application beside this proxy about an exchange that was dumped at
    /// `dumped_at`.
    fn take_output(&mut self, proxy: Option<&ProxyDump>, dumped_at: Instant) -> Option<Output> {
        let index = self.find_output(proxy?, dumped_at)?;
        Some(self.outputs.remove(index).value)
    }

    fn find_output(&self, proxy: &ProxyDump, dumped_at: Instant) -> Option<usize> {
        let ProxyDump { source, dump, .. } = proxy;
        let duration = Duration::try_from_secs_f64(dump.duration_ms / 1000.0).ok()?;
        let start_line = |part: &Option<Part>| part.as_ref().map(|part| part.start_line.clone());
        let (request, response) = (start_line(&dump.request), start_line(&dump.response));
        self.outputs.iter().position(|pending| {
            let output = &pending.value;
            let about = output.lines.get(1).map(String::as_str);
            pending.began + duration + SETTLE_TIME >= dumped_at
                && output.source.pod == source.pod
                && output.source.namespace == source.namespace
                && starts_block(&output.lines[0])
                && about.is_some()
                && [request.as_deref(), response.as_deref(), dump.path()].contains(&about)
        })
    }
}

/// Whether an exchange that `inner` describes can be part of `outer`: the same request, sent from
/// the same pod to the selected endpoint, within its time.
fn contains(outer: &exchange::Exchange, inner: &exchange::Exchange) -> bool {
    let start_line =
        |dump: &exchange::Exchange| dump.request.as_ref().map(|part| part.start_line.clone());
    let time = |dump: &exchange::Exchange| dump.time.parse::<Timestamp>();
    let (Ok(began), Ok(started)) = (time(outer), time(inner)) else {
        return false;
    };
    // Both times are rounded to milliseconds.
    let tolerance = SignedDuration::from_millis(2);
    let duration = SignedDuration::from_secs_f64(outer.duration_ms / 1000.0);
    outer.peer.ip() == inner.peer.ip()
        && outer
            .endpoint
            .is_none_or(|endpoint| endpoint == inner.destination)
        && outer.opaque == inner.opaque
        && start_line(outer) == start_line(inner)
        && (-tolerance..=duration + tolerance).contains(&started.duration_since(began))
}

/// The namespace and the name of the pod of a container.
fn pod_of(source: &Source) -> (String, String) {
    (source.namespace.clone(), source.pod.clone())
}

/// When lines are printed without an exchange.
fn ends_at(pending: &Pending<Output>) -> Instant {
    let Output { source, lines } = &pending.value;
    let about_exchange =
        starts_block(&lines[0]) && !PROXY_CONTAINERS.contains(&source.container.as_str());
    pending.updated
        + if about_exchange {
            OUTPUT_TIMEOUT
        } else {
            QUIET_TIME
        }
}

fn starts_block(line: &str) -> bool {
    BLOCK_STARTS.iter().any(|start| line.starts_with(start))
}

//! The proxies of a cluster, asked directly: by port-forward to their pods. Needs the right
//! `pods/portforward` in their namespaces, and no controller. Or the proxies of a demo, by its
//! socket.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use clap::Args;
use diy_mesh_model::exchange::{Direction, Exchange, ExchangeId, Recent};
use diy_mesh_model::state::State;
use diy_mesh_proto::traffic::Traffic;
use diy_mesh_sandbox::page::{self, Page};
use diy_mesh_sandbox::socket;
use k8s_openapi::api::core::v1;
use kube::{Api, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;

use crate::{
    cluster::{self, Cluster, FORBIDDEN, describe_error},
    pods,
    time::{format_relative, now, parse_timestamp},
    why::{Record, Story},
};

const TIMEOUT: Duration = Duration::from_secs(10);
/// The pods of a workload that are asked.
const MAX_PODS: usize = 16;

/// The source of proxies: a cluster or a demo.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    #[command(flatten)]
    cluster: cluster::Arguments,
    /// Ask the demo that runs on this machine, not a cluster
    #[arg(long, conflicts_with_all = ["context", "mesh_namespace"])]
    pub demo: bool,
}

/// The proxies of a cluster or of a demo.
#[derive(Clone)]
pub enum Proxies {
    /// The proxies of a cluster.
    Cluster(Box<Cluster>),
    /// The proxies of the demo with this socket, and the namespace of names without one.
    Demo(PathBuf, String),
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The name of its workload.
    pub workload: String,
    /// The Services of its namespace that it is an endpoint of. Only the demo knows them.
    pub services: Vec<String>,
    addresses: Vec<IpAddr>,
    /// The admin port of its proxy. The demo knows it by itself.
    admin_port: u16,
    /// It has a proxy.
    is_meshed: bool,
}

/// There is no such pod.
#[derive(Debug, thiserror::Error)]
#[error("no pod with a proxy of the mesh is {0}")]
pub struct NoPod(String);

impl Pod {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether this is its name, or the name of its workload.
    fn is_named(&self, name: &str) -> bool {
        [&*self.name, &*self.workload].contains(&name)
    }

    /// Whether it is of a version of this application, by the usual names: `web-v2` of `web`.
    fn is_version_of(&self, name: &str) -> bool {
        let rest = self.name.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('-'))
    }
}

impl From<&pods::Pod> for Pod {
    fn from(pod: &pods::Pod) -> Self {
        let status = pod.status.as_ref();
        let ips = status.and_then(|status| status.pod_ips.as_ref());
        let first = status.and_then(|status| status.pod_ip.as_ref());
        let ips = first
            .into_iter()
            .chain(ips.into_iter().flatten().map(|one| &one.ip));
        Self {
            namespace: pod.namespace().unwrap_or_default(),
            workload: pods::workload(pod).to_owned(),
            services: vec![],
            name: pod.name_any(),
            addresses: ips.filter_map(|ip| ip.parse().ok()).collect(),
            admin_port: pods::admin_port(pod),
            is_meshed: pods::is_injected(pod),
        }
    }
}

impl Arguments {
    /// Connects to the cluster or to the demo.
    pub async fn connect(&self) -> Result<Proxies> {
        if self.demo {
            return Proxies::of_demo(self.cluster.namespace.as_deref()).await;
        }
        let cluster = Cluster::connect(&self.cluster).await?;
        Ok(Proxies::Cluster(Box::new(cluster)))
    }
}

impl Proxies {
    /// The proxies of the demo that runs on this machine. Names are in this namespace.
    pub async fn of_demo(namespace: Option<&str>) -> Result<Self> {
        let path = socket::demo_socket();
        socket::connect(&path).await?;
        let namespace = namespace.unwrap_or("default").to_owned();
        Ok(Self::Demo(path, namespace))
    }

    /// The pods with a proxy in a namespace, or in all ("").
    pub async fn all(&self, namespace: &str) -> Result<Vec<Pod>> {
        let mut all = match self {
            Self::Cluster(cluster) => {
                let only = Some(namespace).filter(|namespace| !namespace.is_empty());
                let pods = cluster::objects(&cluster.client, only);
                active(cluster::list(pods, &ListParams::default()).await)?
            }
            Self::Demo(socket, _) => of_demo(socket).await?,
        };
        let is_asked = |pod: &Pod| namespace.is_empty() || pod.namespace == namespace;
        all.retain(|pod| pod.is_meshed && is_asked(pod));
        Ok(all)
    }

    /// `NAMESPACE/NAME` of `[NAMESPACE/]NAME`, by default in the given namespace, in the namespace
    /// of the context, or in `default`.
    pub fn full_name(&self, name: &str) -> String {
        let default = match self {
            Self::Cluster(cluster) => cluster.client.default_namespace(),
            Self::Demo(_, namespace) => namespace,
        };
        cluster::full_name(name, default)
    }

    /// The pods with a proxy that have the name `NAMESPACE/NAME` or belong to a workload of that
    /// name, else the pods whose names begin with it. At most 16.
    pub async fn named(&self, full_name: &str) -> Result<Vec<Pod>> {
        let (namespace, name) = names(full_name);
        let mut found = named(self.all(namespace).await?, name);
        found.truncate(MAX_PODS);
        ensure!(!found.is_empty(), NoPod(full_name.to_owned()));
        Ok(found)
    }

    /// The names of the pods that a headless Service selects, which its clients call by their
    /// addresses. Empty if it has a cluster IP, or cannot be read.
    pub async fn pods_of_headless(&self, full_name: &str) -> BTreeSet<String> {
        let Self::Cluster(cluster) = self else {
            return BTreeSet::new();
        };
        let (namespace, name) = names(full_name);
        let services: Api<v1::Service> = Api::namespaced(cluster.client.clone(), namespace);
        let spec = services
            .get(name)
            .await
            .ok()
            .and_then(|service| service.spec);
        let spec = spec.filter(|spec| spec.cluster_ip.as_deref() == Some("None"));
        let Some(selector) = spec.and_then(|spec| spec.selector) else {
            return BTreeSet::new();
        };
        let labels = selector
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        let params = ListParams::default().labels(&labels.collect::<Vec<_>>().join(","));
        let pods = cluster::objects::<pods::Pod>(&cluster.client, Some(namespace));
        let pods = cluster::list(pods, &params).await.unwrap_or_default();
        let names = pods
            .iter()
            .map(|pod| format!("{namespace}/{}", pod.name_any()));
        names.collect()
    }

    /// The pod with a proxy and this address.
    async fn at(&self, address: IpAddr) -> Result<Pod> {
        let found = self.holder(address).await?.filter(|pod| pod.is_meshed);
        Ok(found.ok_or_else(|| NoPod(format!("at {address}")))?)
    }

    /// The pod with this address.
    async fn holder(&self, address: IpAddr) -> Result<Option<Pod>> {
        let found = match self {
            Self::Cluster(cluster) => with_address(cluster, address).await?,
            Self::Demo(socket, _) => of_demo(socket).await?,
        };
        let mut found = found.into_iter();
        Ok(found.find(|pod| pod.addresses.contains(&address)))
    }

    /// The recent exchanges of a pod that a query asks for.
    pub async fn recent(&self, pod: &Pod, query: &str) -> Result<Recent> {
        self.ask(pod, &format!("/exchanges?{query}")).await
    }

    /// The state in force in the proxy of a pod, for a query.
    pub async fn state(&self, pod: &Pod, query: &str) -> Result<State> {
        self.ask(pod, &format!("/state?{query}")).await
    }

    /// The totals of the requests that the proxy of a pod has forwarded.
    pub async fn traffic(&self, pod: &Pod) -> Result<Traffic> {
        self.ask(pod, "/traffic").await
    }

    async fn ask<T: DeserializeOwned>(&self, pod: &Pod, path: &str) -> Result<T> {
        let value = match self {
            Self::Cluster(cluster) => parsed(page_by_port_forward(cluster, pod, path)).await,
            Self::Demo(socket, _) => {
                let path = format!("/pods/{}/admin{path}", pod.full_name());
                parsed(page_of_demo(socket, &path)).await
            }
        };
        let pod = pod.full_name();
        value.map_err(|reason| anyhow!("the proxy of {pod} cannot be asked: {reason}"))
    }

    /// The known records of an exchange. The proxy of the pod that it names is asked, then the
    /// proxy of the endpoint.
    pub async fn story(&self, id: ExchangeId) -> Result<Story> {
        let pod = self.at(id.pod).await?;
        let known = self.recent(&pod, &format!("id={id}")).await?;
        let Some(exchange) = known.exchanges.into_iter().next_back() else {
            let missing = format!(
                "The proxy of {} no longer knows exchange {id}: it keeps the latest 256 failures and 256 others.",
                pod.full_name()
            );
            return Ok(Story {
                missing: vec![missing],
                ..Story::default()
            });
        };
        Ok(self.complete(&pod, exchange).await)
    }

    /// The story of an exchange that one proxy knows.
    pub async fn complete(&self, pod: &Pod, exchange: Exchange) -> Story {
        let record = Record {
            pod: pod.full_name(),
            exchange,
        };
        if record.exchange.direction == Direction::Inbound {
            return Story {
                missing: self.unmeshed_client(&record.exchange).await,
                callee: Some(record),
                ..Story::default()
            };
        }
        let (callee, missing) = match self.callee(&record.exchange).await {
            Ok(callee) => (callee, None),
            Err(error) => (None, Some(format!("The callee is unknown: {error}."))),
        };
        Story {
            caller: Some(record),
            callee,
            missing: missing.into_iter().collect(),
        }
    }

    /// The story of the latest failure of a workload or pod that is selected, else of the latest
    /// exchange with a retry, or of the latest one. `None`: no proxy knows one.
    pub async fn latest(
        &self,
        name: &str,
        is_selected: impl Fn(&Exchange) -> bool,
    ) -> Result<Option<Story>> {
        let mut found: Option<(Pod, Exchange)> = None;
        let mut successes = Vec::new();
        for pod in self.named(name).await? {
            for exchange in self.recent(&pod, "").await?.exchanges {
                if is_selected(&exchange) && !exchange.is_failure() {
                    successes.push(exchange.time.clone());
                }
                let order = |one: &Exchange| {
                    let is_retried = one.failed_attempt().is_some();
                    (one.is_failure(), is_retried, one.time.clone())
                };
                let is_later = |(_, best): &(Pod, Exchange)| order(&exchange) >= order(best);
                if is_selected(&exchange) && found.as_ref().is_none_or(is_later) {
                    found = Some((pod.clone(), exchange));
                }
            }
        }
        Ok(match found {
            Some((pod, exchange)) => {
                let age = age(&exchange, &successes, now());
                let mut story = self.complete(&pod, exchange).await;
                story.missing.extend(age);
                Some(story)
            }
            None => None,
        })
    }

    /// The story of the latest failure from a workload to a Service; or from a service account, or
    /// callers without an identity (a name without a slash), to a workload.
    pub async fn latest_between(&self, from: &str, to: &str) -> Result<Option<Story>> {
        match self.latest(from, |one| one.is_to(to)).await {
            Ok(Some(known)) => Ok(Some(known)),
            Err(error) if !error.is::<NoPod>() => Err(error),
            _ => self.latest(to, |one| is_from(one, from)).await,
        }
    }

    /// A note if the client of an inbound exchange is a pod without a proxy.
    async fn unmeshed_client(&self, exchange: &Exchange) -> Vec<String> {
        let pod = match &exchange.identity {
            Some(_) => None,
            None => self.holder(exchange.peer.ip()).await.ok().flatten(),
        };
        let pod = pod.filter(|pod| !pod.is_meshed).map(|pod| pod.full_name());
        let text = |pod| format!("The client is pod {pod}, which has no proxy of the mesh.");
        pod.into_iter().map(text).collect()
    }

    /// The record of the callee's proxy: of the same identifier, or of the opaque connection
    /// between the same addresses. `None`: nothing was sent to a proxy.
    async fn callee(&self, exchange: &Exchange) -> Result<Option<Record>> {
        let course = exchange.course.as_ref();
        let last = course.and_then(|course| course.attempts.last());
        let Some(last) = last.filter(|last| last.identity.is_some()) else {
            return Ok(None);
        };
        let local = course.and_then(|course| course.local);
        let pod = self.at(last.endpoint.ip()).await?;
        let query = match (local, exchange.id) {
            (None, Some(id)) => format!("id={id}"),
            _ => "after=0".into(),
        };
        let known = self.recent(&pod, &query).await?.exchanges;
        let found = known.into_iter().rev().find(|other| match local {
            Some(local) => other.peer == local,
            None => other.id == exchange.id && other.direction != exchange.direction,
        });
        Ok(found.map(|exchange| Record {
            pod: pod.full_name(),
            exchange,
        }))
    }
}

/// How long ago a failure was, and the exchanges since then.
fn age(exchange: &Exchange, successes: &[String], now: u64) -> Option<String> {
    let time = parse_timestamp(&exchange.time).filter(|_| exchange.is_failure())?;
    let age = format_relative(time, now);
    let later = successes.iter().filter(|success| **success > exchange.time);
    Some(match later.count() {
        0 => format!("The failure was {age}. No later exchange is known."),
        count => format!("The failure was {age}. Later exchanges that did not fail: {count}."),
    })
}

/// The pods that a name means.
fn named(mut pods: Vec<Pod>, name: &str) -> Vec<Pod> {
    if pods.iter().any(|pod| pod.is_named(name)) {
        pods.retain(|pod| pod.is_named(name));
    } else {
        pods.retain(|pod| pod.is_version_of(name));
    }
    pods
}

/// Namespace and name of `NAMESPACE/NAME`.
pub(crate) fn names(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}

/// Whether an inbound exchange is of this service account, or of a caller without an identity.
fn is_from(exchange: &Exchange, account: &str) -> bool {
    let is_account = match (&exchange.identity, account.split_once('/')) {
        (Some(identity), Some((namespace, name))) => {
            identity.ends_with(&format!("/ns/{namespace}/sa/{name}"))
        }
        (None, Some(_)) => false,
        (identity, None) => identity.is_none(),
    };
    exchange.direction == Direction::Inbound && is_account
}

/// The value of a page in JSON.
async fn parsed<T: DeserializeOwned>(
    page: impl Future<Output = Result<Page, String>>,
) -> Result<T, String> {
    let page = tokio::time::timeout(TIMEOUT, page).await;
    let page = page
        .unwrap_or_else(|_| Err("timed out".into()))?
        .success()?;
    serde_json::from_str(&page).map_err(|error| format!("unexpected response: {error}"))
}

async fn page_by_port_forward(cluster: &Cluster, pod: &Pod, path: &str) -> Result<Page, String> {
    let api: Api<v1::Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let port = pod.admin_port;
    let forwarder = api.portforward(&pod.name, &[port]).await;
    let mut forwarder = forwarder.map_err(describe_error)?;
    let stream = forwarder.take_stream(port).ok_or("no stream")?;
    let page = page::read(stream, path).await;
    page.map_err(|error| error.to_string())
}

async fn page_of_demo(socket: &Path, path: &str) -> Result<Page, String> {
    let stream = socket::connect(socket).await;
    let stream = stream.map_err(|error| error.to_string())?;
    let page = page::read(stream, path).await;
    page.map_err(|error| error.to_string())
}

/// The pods with this address: among the pods of all namespaces, or of the own one, if not all may
/// be listed.
async fn with_address(cluster: &Cluster, address: IpAddr) -> Result<Vec<Pod>> {
    let client = &cluster.client;
    let params = ListParams::default().fields(&format!("status.podIP={address}"));
    let mut listed = cluster::list(Api::all(client.clone()), &params).await;
    if listed
        .as_ref()
        .is_err_and(|error| error.starts_with(FORBIDDEN))
    {
        listed = cluster::list(Api::default_namespaced(client.clone()), &params).await;
    }
    active(listed)
}

fn active(listed: Result<Vec<pods::Pod>, String>) -> Result<Vec<Pod>> {
    let listed = listed.map_err(|error| anyhow!("failed to list pods: {error}"))?;
    let active = listed.iter().filter(|pod| pods::is_active(pod));
    Ok(active.map(Pod::from).collect())
}

/// The pods of a demo.
async fn of_demo(socket: &Path) -> Result<Vec<Pod>> {
    let listed: Result<Vec<socket::Pod>, String> = parsed(page_of_demo(socket, "/pods")).await;
    let listed = listed.map_err(|error| anyhow!("failed to list pods: {error}"))?;
    let pods = listed.into_iter().map(|pod| Pod {
        namespace: pod.namespace,
        name: pod.name,
        workload: pod.workload,
        services: pod.services,
        addresses: pod.ips,
        admin_port: 0,
        is_meshed: pod.injected,
    });
    Ok(pods.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn latest_failure_has_its_age_and_the_successes_since_then() {
        let exchange = |failure: serde_json::Value| -> Exchange {
            let exchange = json!({
                "time": "1970-01-01T00:01:00.5Z", "direction": "outbound", "peer": "10.0.0.1:1",
                "destination": "10.0.0.2:80", "protocol": "http1", "duration_ms": 1.0, "failure": failure,
            });
            serde_json::from_value(exchange).expect("an exchange")
        };
        let failed = exchange(json!({"code": "connect-failed", "message": "cannot connect"}));
        let times = ["1970-01-01T00:01:00.1Z", "1970-01-01T00:02:00.1Z"].map(String::from);
        let text = |successes| age(&failed, successes, 720);
        assert_eq!(
            text(&times[..1]).as_deref(),
            Some("The failure was 11 min ago. No later exchange is known.")
        );
        assert_eq!(
            text(&times).as_deref(),
            Some("The failure was 11 min ago. Later exchanges that did not fail: 1.")
        );
        assert_eq!(age(&exchange(json!(null)), &times, 720), None);
    }

    #[test]
    fn name_means_a_pod_or_a_workload_else_versions() {
        let created = |name: &str| {
            let mut pod = pod(name);
            let hash = ("pod-template-hash".into(), "7f".into());
            pod.metadata.labels = Some([hash].into());
            Pod::from(&pod)
        };
        let pods = [
            "web-7f-abc",
            "web-api-7f-abc",
            "cart-v1-7f-abc",
            "cart-v2-7f-abc",
        ]
        .map(created);
        for (name, expected) in [
            ("web", &["web-7f-abc"][..]),
            ("web-api", &["web-api-7f-abc"]),
            ("web-7f-abc", &["web-7f-abc"]),
            ("web-7f-abc-1", &[]),
            ("we", &[]),
            ("cart", &["cart-v1-7f-abc", "cart-v2-7f-abc"]),
        ] {
            let found = named(pods.to_vec(), name);
            let found: Vec<_> = found.iter().map(|pod| &*pod.name).collect();
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn pod_of_a_cluster_has_all_of_its_addresses() {
        let found = Pod::from(&pod("web"));
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert!(found.addresses.contains(&address("10.244.0.7")));
        assert!(found.addresses.contains(&address("fd00::7")));
        assert_eq!(found.admin_port, 4001);
    }

    #[test]
    fn caller_is_a_service_account_or_has_no_identity() {
        let exchange = |direction: &str, identity: Option<&str>| -> Exchange {
            serde_json::from_value(json!({
                "time": "", "direction": direction, "peer": "10.244.1.7:40000",
                "destination": "10.96.0.7:80", "protocol": "http1", "duration_ms": 3.5,
                "identity": identity,
            }))
            .expect("an exchange")
        };
        let web = Some("spiffe://cluster.local/ns/shop/sa/web");
        for (direction, identity, account, expected) in [
            ("inbound", web, "shop/web", true),
            ("outbound", web, "shop/web", false),
            ("inbound", web, "shop/eb", false),
            ("inbound", None, "shop/web", false),
            ("inbound", None, "(no identity)", true),
            ("inbound", web, "(no identity)", false),
        ] {
            let is = is_from(&exchange(direction, identity), account);
            assert_eq!(is, expected, "{identity:?} {account}");
        }
    }

    fn pod(name: &str) -> pods::Pod {
        let status =
            json!({"podIP": "10.244.0.7", "podIPs": [{"ip": "10.244.0.7"}, {"ip": "fd00::7"}]});
        let pod = json!({"metadata": {"namespace": "shop", "name": name}, "status": status});
        diy_mesh_model::json::read(&pod).expect("a pod")
    }
}

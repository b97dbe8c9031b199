//! The calls that proxies saw: the calls to pods that policies judge, with their callees as pods, and
//! the calls by pods to outside of the cluster. Pure.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use diy_mesh_controller::edges;
use diy_mesh_controller::kinds::Pod;
use diy_mesh_controller::kinds::pod::{ContainerPort, Inbound};
use diy_mesh_controller::kinds::service::Transport;
use diy_mesh_controller::object::Key;
use diy_mesh_model::{
    identity::{Identity, TRUST_DOMAIN},
    ports::PortSet,
};
use diy_mesh_proto::{
    authorization::edge::ends_of_block,
    mesh::v1::{
        AuthorizedPath, Edge, GetEdgesResponse, authorized_path::Kind, edge,
        get_edges_response::Group,
    },
};

use crate::{
    authorization::{Call, Caller, Claims, Head, Path},
    controller::{self, Controllers},
    files,
};

/// The calls that proxies saw, and the trust domain of the mesh.
pub struct Observed {
    /// By the pods whose proxies saw them.
    pub groups: Vec<Group>,
    /// The trust domain of all accounts.
    pub trust_domain: String,
}

impl Observed {
    /// The calls to pods and by pods that the controllers keep, of a namespace or of all, or the
    /// calls in a file. A proxy reports to one replica, and replicas unite their reports every five
    /// minutes only.
    pub async fn read(
        controllers: &controller::Arguments,
        file: Option<&PathBuf>,
        namespace: &str,
    ) -> Result<Self> {
        if let Some(file) = file {
            let context = || format!("failed to read {}", file.display());
            let text = std::fs::read_to_string(file).with_context(context)?;
            let all: GetEdgesResponse = serde_json::from_str(&text).with_context(context)?;
            return Ok(Self {
                groups: all.groups,
                trust_domain: TRUST_DOMAIN.to_owned(),
            });
        }
        let controllers = Controllers::new(controllers).await?;
        let (replicas, missing) = controllers.edges(namespace).await?;
        let notes = missing.iter().map(|(name, error)| {
            format!("{name} does not respond, so what its proxies saw last may be missing: {error}")
        });
        files::print(&notes.collect::<Vec<_>>());
        let (domains, groups): (Vec<_>, Vec<_>) = replicas.into_values().unzip();
        let domain = domains.into_iter().find(|domain| !domain.is_empty());
        Ok(Self {
            groups: edges::united(groups.into_iter().flatten()),
            trust_domain: domain.unwrap_or_else(|| TRUST_DOMAIN.to_owned()),
        })
    }
}

/// One pod of a group. Its proxy allowed what it saw.
pub fn pod(group: &Group, name: &str, trust_domain: &str) -> Pod {
    let (namespace, account) = (&group.namespace, &group.service_account);
    let ports = group.ports.iter().filter_map(|port| {
        Some(ContainerPort {
            name: port.name.as_str().into(),
            port: port.port.try_into().ok()?,
            protocol: match &*port.protocol {
                "UDP" => Transport::Udp,
                "SCTP" => Transport::Sctp,
                _ => Transport::Tcp,
            },
        })
    });
    Pod {
        key: Key::new(namespace, name),
        uid: "".into(),
        addresses: vec![],
        host_network: false,
        terminating: false,
        ready: true,
        unready_by_node: false,
        created: 0,
        node: "".into(),
        zone: "".into(),
        identity: Some(format!("spiffe://{trust_domain}/ns/{namespace}/sa/{account}").into()),
        bypassed: PortSet::default(),
        restricts_udp: false,
        inbound: Inbound {
            allow_connect: true,
            ports: ports.collect(),
            ..Inbound::default()
        },
        labels: group.labels.clone(),
    }
}

/// The edges of a group that are calls to its pods.
pub fn called(group: &Group) -> impl Iterator<Item = &Edge> + Clone {
    let edges = group.edges.iter().filter_map(|seen| seen.edge.as_ref());
    edges.filter(|edge| edge.destination.is_empty() && edge.silent.is_none())
}

/// The calls of an edge, as far as they are known. A block stands for the calls of its first and
/// its last address. Empty if the caller has no valid identity.
pub fn calls(edge: &Edge) -> Vec<Call> {
    let Some(call) = call(edge) else {
        return vec![];
    };
    match ends_of_block(&edge.block) {
        None => vec![call],
        Some(ends) => Vec::from(ends.map(|address| Call {
            address: Some(address),
            ..call.clone()
        })),
    }
}

fn call(edge: &Edge) -> Option<Call> {
    let caller = match &*edge.caller {
        "" => Caller::Unauthenticated,
        identity => Caller::Spiffe(identity.parse().ok()?),
    };
    let head = Head {
        method: edge.method.clone(),
        path: path(edge),
        host: None,
        fields: None,
        token: Claims::Unknown,
    };
    Some(Call {
        caller,
        address: None,
        request: Some(head).filter(|head| !head.method.is_empty()),
    })
}

fn path(edge: &Edge) -> Path {
    let prefix = |path: &String| AuthorizedPath {
        kind: Some(Kind::Prefix(path.clone())),
    };
    match &edge.path {
        None => Path::Unknown,
        Some(edge::Path::Grpc(path)) => Path::Known(path.clone()),
        Some(edge::Path::Segment(path)) if path.len() == 1 => Path::Known(path.clone()),
        Some(edge::Path::Segment(path)) => Path::Like(prefix(path)),
        Some(edge::Path::Pattern(AuthorizedPath {
            kind: Some(Kind::Exact(path)),
        })) => Path::Known(path.clone()),
        Some(edge::Path::Pattern(pattern)) => Path::Like(pattern.clone()),
    }
}

/// The pods of a group, for people.
pub fn title(group: &Group) -> String {
    let (namespace, account) = (&group.namespace, &group.service_account);
    match &*labels(&group.labels) {
        _ if account.is_empty() => format!("{namespace}, other pods"),
        "" => format!("{namespace}/{account}"),
        labels => format!("{namespace}/{account} {labels}"),
    }
}

/// Labels, for people: `app=web,tier=front`.
pub fn labels(labels: &BTreeMap<String, String>) -> String {
    let labels = labels.iter().map(|(name, value)| format!("{name}={value}"));
    labels.collect::<Vec<_>>().join(",")
}

/// An edge, for people: `GET /shop/... from shop/web`.
pub fn describe(edge: &Edge) -> String {
    format!("{} from {}", what(edge), caller(edge))
}

/// The calls of an edge, for people: `GET /shop/...`.
pub fn what(edge: &Edge) -> String {
    match &*edge.method {
        "" => "connections".to_owned(),
        method => format!("{method} {}", describe_path(&path(edge))),
    }
}

/// The caller of an edge, for people: `shop/web`.
pub fn caller(edge: &Edge) -> String {
    let identity: Option<Identity> = edge.caller.parse().ok();
    match identity {
        Some(caller) => format!("{}/{}", caller.namespace(), caller.service_account()),
        None if edge.block.is_empty() => "unauthenticated".to_owned(),
        None => format!("unauthenticated {}", edge.block),
    }
}

fn describe_path(path: &Path) -> String {
    let Path::Like(pattern) = path else {
        return match path {
            Path::Known(path) => path.clone(),
            _ => "(path not recorded)".to_owned(),
        };
    };
    match &pattern.kind {
        Some(Kind::Prefix(prefix)) => format!("{}/...", prefix.trim_end_matches('/')),
        Some(Kind::Suffix(suffix)) => format!("...{suffix}"),
        Some(Kind::Template(path) | Kind::Exact(path)) => path.clone(),
        None => String::new(),
    }
}

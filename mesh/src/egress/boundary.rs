//! The NetworkPolicies that bound what Outbound AuthorizationPolicies close. They hold for what
//! bypasses a proxy, too. Pure.
//!
//! Both kinds are unions: a pod may call what one of its policies allows. So each target of an ALLOW
//! policy is one NetworkPolicy, which allows at least the same.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use diy_mesh_controller::object::Kind;
use diy_mesh_proto::mesh::v1::{
    AuthorizationPolicy, authorization_policy::Action, authorization_source,
};
use serde_json::{Value, json};

use super::outbound::{self, Outbound};
use crate::files;
use crate::names::unique;

/// Addresses in private networks, of nodes and of services of clouds. No rule with a name opens them.
const PRIVATE: [&[&str]; 2] = [
    &[
        "10.0.0.0/8",
        "100.64.0.0/10",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
    ],
    &["fc00::/7", "fe80::/10"],
];

/// The NetworkPolicies of a namespace.
#[derive(Debug, Default)]
pub struct Boundary {
    /// In the order of the AuthorizationPolicies.
    pub policies: Vec<Value>,
    /// The parts of the AuthorizationPolicies that they do not express.
    pub gaps: Vec<String>,
    /// The targets that have no NetworkPolicy.
    pub missing: Vec<String>,
}

/// The other end of calls.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Peer {
    Block(String),
    Public,
    Any,
}

/// The NetworkPolicies for the policies among the objects that close pods of the namespace. `mesh`:
/// the namespace of the mesh.
pub fn boundary(objects: &[Value], namespace: &str, mesh: &str) -> Result<Boundary> {
    let policies = objects.iter().filter(|one| {
        one["kind"] == Kind::Authorization.name()
            && [namespace, mesh].contains(&files::namespace(one))
    });
    let read = policies.map(outbound::read);
    let mut all: Vec<Outbound> = read.filter_map(Result::transpose).collect::<Result<_>>()?;
    all.sort_by(|one, other| {
        let order = |policy: &Outbound| (policy.namespace != namespace, policy.name.clone());
        order(one).cmp(&order(other))
    });
    let (mut boundary, mut names) = (Boundary::default(), BTreeSet::new());
    for policy in &all {
        if policy.message.action() == Action::Deny {
            let gap = format!("the rules of {}, which denies", policy.message.name);
            boundary.gaps.push(gap);
            continue;
        }
        let egress = egress(&policy.message);
        for target in &policy.targets {
            match target {
                Ok(selector) => {
                    let name = unique(
                        &format!("mesh-egress-{}", policy.name),
                        namespace,
                        &mut names,
                    );
                    boundary.policies.push(json!({
                        "apiVersion": "networking.k8s.io/v1",
                        "kind": "NetworkPolicy",
                        "metadata": {"name": name, "namespace": namespace},
                        "spec": {"podSelector": selector, "policyTypes": ["Egress"], "egress": egress},
                    }));
                }
                // The mesh selects pods of other namespaces by labels only.
                Err(_) if policy.namespace != namespace => {}
                Err(account) => boundary.missing.push(format!(
                    "{}: no NetworkPolicy for ServiceAccount {account} (name its pods by their labels)",
                    policy.message.name
                )),
            }
        }
        if has_names(&policy.message) {
            boundary.gaps.push(format!(
                "the names of {}: its rules with hosts open their ports to all public addresses, and \
                 a name with a private address requires its ipBlock, too",
                policy.message.name
            ));
        }
    }
    ensure!(
        !boundary.policies.is_empty() || !boundary.missing.is_empty(),
        "no AuthorizationPolicy with the direction Outbound and the mode Enforce allows calls of pods of \
         the namespace {namespace}: there is nothing to bound"
    );
    Ok(boundary)
}

fn has_names(policy: &AuthorizationPolicy) -> bool {
    let sources = policy.rules.iter().flat_map(|rule| &rule.sources);
    let mut sources = sources.flat_map(|list| &list.sources);
    sources.any(|source| matches!(source.kind, Some(authorization_source::Kind::Host(_))))
}

/// Calls to pods, DNS, and what the policy allows.
fn egress(policy: &AuthorizationPolicy) -> Vec<Value> {
    let mut peers: BTreeMap<Vec<u32>, BTreeSet<Peer>> = BTreeMap::new();
    for rule in &policy.rules {
        let mut ports = rule.ports.clone();
        ports.sort_unstable();
        ports.dedup();
        let peers = peers.entry(ports).or_default();
        match &rule.sources {
            None => drop(peers.insert(Peer::Any)),
            Some(list) => peers.extend(list.sources.iter().filter_map(|source| {
                Some(match source.kind.as_ref()? {
                    authorization_source::Kind::IpBlock(block) => Peer::Block(block.clone()),
                    _ => Peer::Public,
                })
            })),
        }
    }
    let tcp = |port: u32| json!({"protocol": "TCP", "port": port});
    let mut egress = vec![json!({"to": [{"namespaceSelector": {}}],
        "ports": [{"protocol": "TCP"}, {"protocol": "UDP", "port": 53}]})];
    for (ports, peers) in peers.iter().filter(|(_, peers)| !peers.is_empty()) {
        let to: Vec<Value> = peers.iter().flat_map(blocks).collect();
        let ports = match &ports[..] {
            [] => vec![json!({"protocol": "TCP"})],
            ports => ports.iter().map(|port| tcp(*port)).collect(),
        };
        egress.push(json!({"to": to, "ports": ports}));
    }
    if !policy.ports.is_empty() {
        let to: Vec<Value> = blocks(&Peer::Any).collect();
        egress.push(json!({"to": to, "ports": others(&policy.ports)}));
    }
    egress
}

/// The ports that a policy with its own scope does not cover.
fn others(ports: &[u32]) -> Vec<Value> {
    let starts = std::iter::once(1).chain(ports.iter().map(|port| port + 1));
    let ends = ports.iter().map(|port| port - 1).chain([u16::MAX.into()]);
    let ranges = starts.zip(ends).filter(|(start, end)| start <= end);
    let range = |(start, end)| json!({"protocol": "TCP", "port": start, "endPort": end});
    ranges.map(range).collect()
}

fn blocks(peer: &Peer) -> impl Iterator<Item = Value> + use<> {
    let all = [("0.0.0.0/0", PRIVATE[0]), ("::/0", PRIVATE[1])];
    let blocks = match peer {
        Peer::Block(block) => vec![json!({"cidr": block})],
        Peer::Public => all
            .map(|(cidr, except)| json!({"cidr": cidr, "except": except}))
            .to_vec(),
        Peer::Any => all.map(|(cidr, _)| json!({"cidr": cidr})).to_vec(),
    };
    blocks.into_iter().map(|block| json!({"ipBlock": block}))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::networking::v1::NetworkPolicy;

    use super::*;
    use crate::egress::testing::policy;

    /// The boundary of the namespace `shop`. Its NetworkPolicies have the fields of Kubernetes.
    fn bounded(objects: &[Value]) -> Boundary {
        let boundary = boundary(objects, "shop", "service-mesh").unwrap();
        for policy in &boundary.policies {
            let typed: NetworkPolicy = serde_json::from_value(policy.clone()).unwrap();
            assert_eq!(json!(typed), *policy);
        }
        let mut reversed = objects.to_vec();
        reversed.reverse();
        let again = super::boundary(&reversed, "shop", "service-mesh").unwrap();
        assert_eq!(again.policies, boundary.policies);
        boundary
    }

    #[test]
    fn network_policy_allows_what_the_policy_allows() {
        let rules = json!([
            {"destinations": [{"type": "Host", "host": "api.example.com"}, {"type": "Host", "host": "*.example.org"},
                {"type": "IPBlock", "ipBlock": "203.0.113.7/32"}], "networkAttributes": {"ports": [443]}},
            {"destinations": [{"type": "IPBlock", "ipBlock": "2001:db8::/32"},
                {"type": "IPBlock", "ipBlock": "10.0.0.0/8"}]},
            {"destinations": [], "networkAttributes": {"ports": [80]}},
        ]);
        let allow = policy("shop", "egress", json!({"action": "ALLOW", "rules": rules}));
        let boundary = bounded(&[allow]);
        let expected = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: mesh-egress-egress
  namespace: shop
spec:
  egress:
  - ports:
    - protocol: TCP
    - port: 53
      protocol: UDP
    to:
    - namespaceSelector: {}
  - ports:
    - protocol: TCP
    to:
    - ipBlock:
        cidr: 10.0.0.0/8
    - ipBlock:
        cidr: 2001:db8::/32
  - ports:
    - port: 443
      protocol: TCP
    to:
    - ipBlock:
        cidr: 203.0.113.7/32
    - ipBlock:
        cidr: 0.0.0.0/0
        except:
        - 10.0.0.0/8
        - 100.64.0.0/10
        - 169.254.0.0/16
        - 172.16.0.0/12
        - 192.168.0.0/16
    - ipBlock:
        cidr: ::/0
        except:
        - fc00::/7
        - fe80::/10
  podSelector: {}
  policyTypes:
  - Egress
";
        assert_eq!(
            serde_yaml_ng::to_string(&boundary.policies[0]).unwrap(),
            expected
        );
        let [names] = &boundary.gaps[..] else {
            panic!("{:?}", boundary.gaps)
        };
        assert!(names.starts_with("the names of AuthorizationPolicy shop/egress: "));
        assert_eq!(boundary.missing, [""; 0]);
    }

    #[test]
    fn each_target_that_has_labels_is_bounded() {
        let cart = json!({"kind": "Pod", "selector": {"matchLabels": {"app": "cart"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["b", "a"]}]}});
        let account = json!({"kind": "ServiceAccount", "name": "job"});
        let targets = json!([cart, account]);
        let objects = [
            policy(
                "shop",
                "a",
                json!({"action": "ALLOW", "targetRefs": targets}),
            ),
            policy("shop", "deny", json!({"action": "DENY", "rules": [{}]})),
            policy("shop", "later", json!({"action": "ALLOW", "mode": "Audit"})),
            policy("other", "b", json!({"action": "ALLOW"})),
            policy("service-mesh", "a", json!({"defaultAction": "DENY"})),
            policy(
                "service-mesh",
                "c",
                json!({"action": "ALLOW", "scope": "Ports", "targetRefs": [account],
                    "rules": [{"networkAttributes": {"ports": [443]}}]}),
            ),
        ];
        let boundary = bounded(&objects);
        let selected = boundary.policies.iter().map(|policy| {
            let name = policy["metadata"]["name"].as_str().unwrap();
            (name, policy["spec"]["podSelector"].clone())
        });
        let expected = [
            ("mesh-egress-a", cart["selector"].clone()),
            ("mesh-egress-a-2", json!({})),
        ];
        assert_eq!(selected.collect::<Vec<_>>(), expected);
        let missing = [
            "AuthorizationPolicy shop/a: no NetworkPolicy for ServiceAccount job (name its pods by their labels)",
        ];
        assert_eq!(boundary.missing, missing);
        let gaps = ["the rules of AuthorizationPolicy shop/deny, which denies"];
        assert_eq!(boundary.gaps, gaps);
    }

    #[test]
    fn ports_that_a_policy_does_not_cover_stay_open() {
        let rules = json!([{"networkAttributes": {"ports": [65535, 443, 1]}}]);
        let spec = json!({"action": "ALLOW", "scope": "Ports", "rules": rules});
        let boundary = bounded(&[policy("shop", "p", spec)]);
        let egress = boundary.policies[0]["spec"]["egress"].as_array().unwrap();
        let open: Vec<Value> = blocks(&Peer::Any).collect();
        let range = |start, end| json!({"protocol": "TCP", "port": start, "endPort": end});
        let expected = json!({"to": open, "ports": [range(2, 442), range(444, 65534)]});
        assert_eq!(egress[2], expected);
        assert_eq!(egress[1]["to"], json!(open));
    }

    #[test]
    fn namespace_without_a_boundary_is_an_error() {
        let deny = policy("shop", "deny", json!({"action": "DENY", "rules": [{}]}));
        let error = boundary(&[deny], "shop", "service-mesh").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("the namespace shop: there is nothing to bound")
        );
        let invalid = policy(
            "shop",
            "p",
            json!({"action": "ALLOW", "rules": [{"hosts": []}]}),
        );
        assert!(boundary(&[invalid], "shop", "service-mesh").is_err());
    }
}

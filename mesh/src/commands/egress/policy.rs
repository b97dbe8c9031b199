//! `mesh egress --policy`: AuthorizationPolicies that allow exactly the destinations that were seen.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_proto::{authorization::MAX_ITEMS, mesh::v1::get_edges_response::Group};
use serde_json::{Value, json};

use super::super::authz::generate::{Mode, allowing};
use crate::{
    edges::{self, Observed},
    egress::{Destination, destinations},
};

/// The policies of all groups. Notes about missing calls are added to `notes`.
pub(super) fn policies(observed: &Observed, mode: Mode, notes: &mut Vec<String>) -> Vec<Value> {
    let fields = json!({"direction": "Outbound", "mode": format!("{mode:?}")});
    allowing(observed, "egress", &fields, notes, |group, notes| {
        // It stands for others.
        if group.service_account.is_empty() {
            return None;
        }
        let rules = rules(group);
        if rules.is_empty() {
            let title = edges::title(group);
            notes.push(format!(
                "{title}: no call was seen, and the policy allows none"
            ));
        }
        Some(rules)
    })
}

/// A rule for the destinations that were called at the same ports.
fn rules(group: &Group) -> Vec<Value> {
    let mut called: BTreeMap<String, (Value, BTreeSet<u16>)> = BTreeMap::new();
    for one in destinations(group) {
        let entry = called.entry(one.host.clone());
        entry
            .or_insert_with(|| (destination(&one), BTreeSet::new()))
            .1
            .insert(one.port);
    }
    let mut alike: BTreeMap<BTreeSet<u16>, Vec<Value>> = BTreeMap::new();
    for (destination, ports) in called.into_values() {
        alike.entry(ports).or_default().push(destination);
    }
    let mut rules = Vec::new();
    for (ports, destinations) in alike {
        let ports = Vec::from_iter(ports);
        for ports in ports.chunks(MAX_ITEMS) {
            rules.extend(destinations.chunks(MAX_ITEMS).map(|destinations| {
                json!({"destinations": destinations, "networkAttributes": {"ports": ports}})
            }));
        }
    }
    rules
}

fn destination(one: &Destination) -> Value {
    match one.address() {
        None => json!({"type": "Host", "host": one.host}),
        Some(address) => {
            let length = if address.is_ipv4() { 32 } else { 128 };
            json!({"type": "IPBlock", "ipBlock": format!("{address}/{length}")})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::{outbound, testing::observed};

    /// The policies and the notes. The policies are valid.
    fn generated(observed: &Observed) -> (Vec<Value>, Vec<String>) {
        let mut notes = Vec::new();
        let policies = policies(observed, Mode::Enforce, &mut notes);
        for policy in &policies {
            assert!(outbound::read(policy).unwrap().is_some());
        }
        (policies, notes)
    }

    #[test]
    fn policy_allows_what_was_seen() {
        let observed = observed(&[
            "api.example.com:443",
            "192.0.2.7:443",
            "[2001:db8::7]:443",
            "mail.example.com:25",
            "mail.example.com:443",
        ]);
        let (policies, notes) = generated(&observed);
        let expected = "\
apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata:
  name: egress-cart
  namespace: shop
spec:
  action: ALLOW
  direction: Outbound
  mode: Enforce
  rules:
  - destinations:
    - host: mail.example.com
      type: Host
    networkAttributes:
      ports:
      - 25
      - 443
  - destinations:
    - ipBlock: 192.0.2.7/32
      type: IPBlock
    - ipBlock: 2001:db8::7/128
      type: IPBlock
    - host: api.example.com
      type: Host
    networkAttributes:
      ports:
      - 443
  targetRefs:
  - group: ''
    kind: Pod
    selector:
      matchLabels:
        app: cart
";
        assert_eq!(serde_yaml_ng::to_string(&policies[0]).unwrap(), expected);
        assert_eq!(notes, [""; 0]);
    }

    #[test]
    fn bounds_of_policies_hold() {
        let many =
            (0..200).flat_map(|at| [format!("h{at}.test:1"), format!("h{at}.test:{}", 2 + at)]);
        let ports = (1..=150).map(|port| format!("all.test:{port}"));
        let names = (0..150).map(|at| format!("n{at}.test:443"));
        let all: Vec<String> = many.chain(ports).chain(names).collect();
        let all: Vec<&str> = all.iter().map(|one| &**one).collect();
        let (policies, notes) = generated(&observed(&all));
        let names = policies.iter().map(|policy| &policy["metadata"]["name"]);
        let expected = ["egress-cart", "egress-cart-2"];
        assert_eq!(
            (names.collect::<Vec<_>>(), notes),
            (expected.map(Value::from).iter().collect(), vec![])
        );
    }

    #[test]
    fn what_no_policy_covers_is_told() {
        let mut observed = observed(&[]);
        observed.groups[0].incomplete = true;
        let mut others = observed.groups[0].clone();
        others.service_account.clear();
        observed.groups.push(others);
        let (policies, notes) = generated(&observed);
        assert_eq!(
            (policies.len(), &policies[0]["spec"]["rules"]),
            (1, &json!([]))
        );
        let expected = [
            "shop/cart app=cart: there were more calls than are kept",
            "shop/cart app=cart: no call was seen, and the policy allows none",
            "shop, other pods: there were more calls than are kept",
        ];
        assert_eq!(notes, expected);
    }
}

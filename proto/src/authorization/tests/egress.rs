//! Policies of egress: calls by the pods, where the other end is the destination.

use std::net::IpAddr;

use super::*;
use crate::authorization::check_egress;
use crate::mesh::v1::authorization_source::Kind;

fn rule(destinations: Vec<Kind>, ports: &[u32]) -> AuthorizationRule {
    let sources = destinations
        .into_iter()
        .map(|kind| AuthorizationSource { kind: Some(kind) });
    AuthorizationRule {
        revision: 1,
        sources: Some(AuthorizationSources {
            sources: sources.collect(),
        }),
        ports: ports.to_vec(),
        ..AuthorizationRule::default()
    }
}

fn host(name: &str) -> Kind {
    Kind::Host(name.to_owned())
}

fn block(text: &str) -> Kind {
    Kind::IpBlock(text.to_owned())
}

fn to<'a>(address: &str, port: u16, host: Option<&'a str>) -> Call<'a> {
    Call {
        address: address.parse::<IpAddr>().expect("an address"),
        port,
        host,
        ..call(None, None)
    }
}

#[test]
fn destinations_are_matched_by_name_block_and_port() {
    let names = vec![host("api.example.com"), host("*.example.org")];
    let egress = Authorization::compile(&proto::Authorization {
        policies: vec![
            policy("names", Action::Allow, vec![rule(names, &[443])]),
            policy(
                "blocks",
                Action::Allow,
                vec![rule(vec![block("192.0.2.0/24")], &[])],
            ),
            policy(
                "never",
                Action::Deny,
                vec![rule(vec![block("198.51.100.0/24")], &[])],
            ),
        ],
        ..proto::Authorization::default()
    });
    let is_allowed = |address, port, host| egress.judge(&to(address, port, host)).is_ok();
    assert!(is_allowed("203.0.113.1", 443, Some("api.example.com")));
    assert!(is_allowed("203.0.113.1", 443, Some("a.b.EXAMPLE.org")));
    assert!(is_allowed("192.0.2.1", 5432, None));
    for (address, port, host) in [
        ("203.0.113.1", 443, None),
        ("203.0.113.1", 80, Some("api.example.com")),
        ("203.0.113.1", 443, Some("example.org")),
        ("203.0.113.1", 443, Some("xapi.example.com")),
        ("203.0.113.1", 443, Some("api.example.com.evil.test")),
        // A DENY by address holds whatever the name is.
        ("198.51.100.1", 443, Some("api.example.com")),
    ] {
        assert!(
            !is_allowed(address, port, host),
            "{address} {port} {host:?}"
        );
    }
    assert!(egress.names("api.example.com", 443) && !egress.names("api.example.com", 80));
    assert!(!egress.names("example.com", 443));
}

#[test]
fn what_is_no_condition_on_a_destination_is_refused() {
    let of = |action, rules| policy("p", action, rules);
    let allowed = vec![rule(vec![host("a.test"), block("10.0.0.0/8")], &[443])];
    assert_eq!(check_egress(&of(Action::Allow, allowed)), Ok(()));
    assert_eq!(
        check_egress(&of(
            Action::Deny,
            vec![rule(vec![block("10.0.0.0/8")], &[])]
        )),
        Ok(())
    );
    let requests = AuthorizationRule {
        requests: vec![proto::RequestMatch::default()],
        ..rule(vec![], &[80])
    };
    for (policy, field) in [
        (
            of(Action::Deny, vec![rule(vec![host("a.test")], &[])]),
            "rules.destinations.host",
        ),
        (
            of(
                Action::Allow,
                vec![rule(
                    vec![Kind::Unauthenticated(proto::Unauthenticated {})],
                    &[],
                )],
            ),
            "rules.destinations",
        ),
        (of(Action::Allow, vec![requests]), "rules"),
        (of(Action::ExternalAuth, vec![]), "action"),
        (
            of(Action::Allow, vec![rule(vec![host("a_b:80")], &[])]),
            "rules.sources[0].host",
        ),
    ] {
        let refused = check_egress(&policy).map_err(|violation| violation.field);
        assert_eq!(refused, Err(field.into()));
    }
    // A name is no condition on a client.
    let inbound = of(Action::Allow, vec![rule(vec![host("a.test")], &[])]);
    assert!(check(&inbound).is_err());
}

//! XBackends and TrafficPolicies with `backend`: the accepted fields, and the messages for proxies.

use diy_mesh_proto::mesh::v1::{ExternalBackend, ExternalTls};

use super::*;
use crate::kinds::route::backend::{Backend, KINDS, backend, is_backend};
use crate::object::Rejection;

fn parsed(kind: Kind, change: Value) -> Backend {
    let mut spec = json!({
        "type": "ExternalHostname", "port": {"port": 443},
        "externalHostname": {"hostname": "api.example.com"},
    });
    let change = change.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(change);
    if kind == Kind::TrafficPolicy {
        spec = json!({"backend": spec});
    }
    of_spec(kind, &spec)
}

fn of_spec(kind: Kind, spec: &Value) -> Backend {
    let key = Key::new("shop", "api");
    let spec = spec.to_string();
    let meta = Meta::new(kind, key, 0, ("", 7), &spec);
    backend(meta, &spec, "mesh.test")
}

/// The message begins with a field of an XBackend or of a TrafficPolicy.
fn assert_names(rejection: &Rejection, kind: Kind, field: &str) {
    let field = match kind {
        Kind::TrafficPolicy => field.replacen("spec.", "spec.backend.", 1),
        _ => field.to_owned(),
    };
    assert!(rejection.message.starts_with(&field), "{kind}: {rejection}");
}

fn named(hostname: &str) -> Value {
    json!({"externalHostname": {"hostname": hostname}})
}

fn message(backend: &Backend) -> ExternalBackend {
    backend.content.as_ref().unwrap().message.clone()
}

fn tls(change: Value) -> Value {
    let tls = json!({"mode": "ServerOnly"});
    json!({"tls": with(tls, change)})
}

#[test]
fn backend_is_a_host_with_a_port_and_optional_tls() {
    let plain = ExternalBackend {
        name: "XBackend shop/api".to_owned(),
        host: "api.example.com".to_owned(),
        port: 443,
        tls: None,
    };
    let to = |server_name: &str| ExternalBackend {
        tls: Some(ExternalTls {
            server_name: server_name.to_owned(),
            roots: String::new(),
        }),
        ..plain.clone()
    };
    let validation = json!({
        "hostname": "EU.example.com", "wellKnownCACertificates": "System", "subjectAltNames": [],
    });
    let cases = [
        (json!({}), plain.clone()),
        (named("API.Example.com"), plain.clone()),
        (
            json!({"port": {"name": "https", "port": 443}}),
            plain.clone(),
        ),
        (json!({"tls": {"mode": "None"}}), plain.clone()),
        (tls(json!({})), to("api.example.com")),
        (tls(json!({"validation": validation})), to("eu.example.com")),
    ];
    for (change, mut expected) in cases {
        for kind in KINDS {
            expected.name = format!("{kind} shop/api");
            assert_eq!(message(&parsed(kind, change.clone())), expected, "{change}");
        }
    }
}

#[test]
fn backends_that_cannot_be_used_as_they_say_are_not_accepted() {
    let validation = |change| tls(json!({"validation": change}));
    let reference = json!({"group": "", "kind": "Secret", "name": "ca"});
    let cases = [
        (json!({"type": "EndpointSelector"}), "spec.type"),
        (json!({"port": {}}), "spec.port.port"),
        (json!({"port": {"port": 65536}}), "spec.port.port: "),
        (json!({"retry": {}}), "spec.retry"),
        (json!({"protocol": "MCP"}), "spec.protocol"),
        (
            with(tls(json!({})), json!({"protocol": "H2C"})),
            "spec.protocol",
        ),
        (json!({"tls": {"mode": "ClientAndServer"}}), "spec.tls.mode"),
        (json!({"tls": {}}), "spec.tls.mode"),
        (
            tls(json!({"clientCertificateRef": reference})),
            "spec.tls.clientCertificateRef",
        ),
        (
            validation(json!({"caCertificateRefs": [reference]})),
            "spec.tls.validation.caCertificateRefs",
        ),
        (
            validation(json!({"subjectAltNames": [{"type": "Hostname"}]})),
            "spec.tls.validation.subjectAltNames",
        ),
        (
            validation(json!({"wellKnownCACertificates": "Mine"})),
            "spec.tls.validation.wellKnownCACertificates",
        ),
        (
            validation(json!({"hostname": "192.0.2.1"})),
            "spec.tls.validation.hostname",
        ),
        (tls(json!({"skipVerify": true})), "spec.tls.skipVerify"),
    ];
    let both = cases.iter().flat_map(|case| KINDS.map(|kind| (kind, case)));
    for (kind, (change, field)) in both {
        let rejection = parsed(kind, change.clone()).content.unwrap_err();
        let is_protocol = *field == "spec.protocol";
        let reason = ["UnsupportedValue", "UnsupportedProtocol"][usize::from(is_protocol)];
        assert_eq!(rejection.reason, reason, "{change}");
        assert_names(&rejection, kind, field);
    }
}

#[test]
fn policy_is_a_backend_or_has_targets() {
    let host = json!({
        "type": "ExternalHostname", "port": {"port": 443},
        "externalHostname": {"hostname": "api.example.com"},
    });
    let targets = json!([{"kind": "Service", "name": "web"}]);
    for (spec, expected) in [
        (json!({"backend": host}), true),
        (json!({"backend": null}), true),
        (json!({"backend": host, "timeouts": {}}), true),
        (json!({"backend": host, "targetRefs": targets}), false),
        (json!({"backend": host, "targetRefs": []}), false),
        (json!({"backend": host, "targetRefs": null}), false),
        (json!({"targetRefs": targets}), false),
        (json!({}), false),
        (Value::Null, false),
    ] {
        assert_eq!(is_backend(&spec.to_string()), expected, "{spec}");
    }
    let message = |spec| {
        let parsed = of_spec(Kind::TrafficPolicy, &spec);
        parsed.content.map_err(|rejection| rejection.message)
    };
    assert!(message(json!({"backend": host})).is_ok());
    for section in ["timeouts", "unknown"] {
        let expected = format!("spec.{section}: \"set\" is not absent in a policy with backend");
        let spec = json!({"backend": host, section: {}});
        assert_eq!(message(spec), Err(expected));
    }
    let none = message(json!({"backend": null})).unwrap_err();
    assert_eq!(none, "spec.backend.type: \"\" is not ExternalHostname");
}

#[test]
fn host_is_a_name_outside_of_the_cluster_and_no_address() {
    let refused = [
        "",
        "api",
        "localhost",
        "api.example.com.",
        "*.example.com",
        "a_b.example.com",
        "a..b",
        "192.0.2.1",
        "127.1",
        "0.0x7f000001",
        "::1",
        "[::1]",
        "api.example.com:443",
        "cluster.local",
        "web.shop.svc.cluster.local",
        "WEB.shop.svc.Cluster.Local",
        "web.mesh.test",
        "mesh.test",
    ];
    let long = format!("{}.com", "a.".repeat(130));
    let accepted = [
        "api.example.com",
        "mycluster.local",
        "xmesh.test",
        "1.2.3.example",
    ];
    for kind in KINDS {
        for host in refused.into_iter().chain([&*long]) {
            let rejection = parsed(kind, named(host)).content.unwrap_err();
            assert_names(&rejection, kind, "spec.externalHostname.hostname: ");
        }
        for host in accepted {
            assert_eq!(message(&parsed(kind, named(host))).host, host);
        }
    }
}

#[test]
fn routes_use_backends_whose_protocol_they_keep() {
    let uses = |protocol: Option<&str>, kind| {
        let backend = parsed(Kind::Backend, json!({"protocol": protocol}));
        let used = backend.content.unwrap().of_route(kind, Some(443));
        used.map(|_| ()).map_err(|rejection| rejection.reason)
    };
    let (http, grpc, tcp) = (Kind::HttpRoute, Kind::GrpcRoute, Kind::TcpRoute);
    let cases = [
        (None, vec![http, grpc, tcp]),
        (Some("HTTP"), vec![http, grpc]),
        (Some("HTTP11"), vec![http]),
        (Some("HTTP2"), vec![http, grpc]),
        (Some("H2C"), vec![http, grpc]),
        (Some("GRPC"), vec![http, grpc]),
        (Some("TCP"), vec![tcp]),
    ];
    for (protocol, kinds) in cases {
        for kind in [http, grpc, tcp] {
            let is_kept = kinds.contains(&kind);
            let expected = is_kept.then_some(()).ok_or("UnsupportedProtocol");
            assert_eq!(uses(protocol, kind), expected, "{protocol:?} {kind}");
        }
    }
}

#[test]
fn bytes_of_a_route_include_the_hosts_of_its_backends() {
    let bytes = |kind: Value| {
        let reference = with(json!({"name": "a"}), kind);
        let rules = json!([{"backendRefs": vec![reference; 16]}]);
        route("r", 0, rules).bytes
    };
    // 253 bytes each, the namespace, and the lengths.
    let longest = 3 * 253 + 63;
    for kind in KINDS {
        let external = json!({"group": kind.row().group, "kind": kind.name()});
        assert!(bytes(external) > bytes(json!({})) + 16 * longest);
    }
}

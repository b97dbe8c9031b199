//! The section `telemetry`: its fields, what is refused, and how it is merged.

use diy_mesh_proto::telemetry::Telemetry;

use super::*;

fn section(value: Value) -> Value {
    json!({"telemetry": value})
}

#[test]
fn every_field_is_parsed() {
    let settings = settings(section(json!({
        "dump": {"mode": "Full", "path": "/shop", "status": "4xx", "caller": "shop/web",
            "slowerThan": "20ms"},
        "accessLogs": {"mode": "On", "matches": "Failures", "format": "{method} {status}"},
        "tracing": {
            "mode": "On",
            "provider": {"endpoint": "otel.o11y.svc.cluster.local:4317"},
            "samplingRate": {"numerator": 5, "denominator": 1000},
            "parentBasedSampling": {"mode": "On", "samplingRate": {"numerator": 50}},
            "customAttributes": [
                {"name": "env", "type": "Literal", "literalValue": "production"},
                {"name": "tenant", "type": "Header", "headerName": "X-Tenant"},
            ],
        },
    })));
    let message = settings.telemetry.as_deref().unwrap();
    assert_eq!(message.name, "TrafficPolicy shop/p");
    let dump = message.dump.as_ref().unwrap();
    assert_eq!((dump.min_status, dump.max_status), (400, 499));
    let caller = [&*dump.caller_namespace, &*dump.caller_service_account];
    assert_eq!((caller, dump.slower_than), (["shop", "web"], 20));
    let tracing = message.tracing.as_ref().unwrap();
    assert_eq!(tracing.backend, "o11y/otel:4317");
    let share = |share: Option<proto::Share>| {
        let share = share.unwrap();
        (share.numerator, share.denominator)
    };
    assert_eq!(share(tracing.sampling), (5, 1000));
    assert_eq!(share(tracing.parent_sampling), (50, 100));
    let compiled = Telemetry::compile(message).unwrap();
    assert!(compiled.access_logs.unwrap().failures);
    assert_eq!(compiled.tracing.unwrap().attributes.len(), 2);
}

#[test]
fn parents_decide_unless_they_may_not_and_what_is_off_is_kept() {
    let tracing = |tracing: Value| {
        let settings = settings(section(json!({"tracing": tracing})));
        settings
            .telemetry
            .as_ref()
            .unwrap()
            .tracing
            .clone()
            .unwrap()
    };
    let provider = || json!({"endpoint": "otel.o11y.svc:4317"});
    let usual = tracing(json!({"provider": provider()}));
    assert_eq!(usual.sampling.unwrap().numerator, 1);
    assert_eq!(usual.parent_sampling.unwrap().numerator, 100);
    let alone = json!({"provider": provider(), "parentBasedSampling": {"mode": "Off"}});
    assert_eq!(tracing(alone).parent_sampling, None);
    assert!(tracing(json!({"mode": "Off"})).off);
}

#[test]
fn invalid_fields_are_named_with_what_they_may_be() {
    let endpoint = |endpoint: &str| json!({"tracing": {"provider": {"endpoint": endpoint}}});
    let expected = "is not a Service of the cluster, NAME.NAMESPACE.svc:PORT";
    for address in [
        "otel.example.com:4317",
        "10.0.0.7:4317",
        "otel.o11y.svc",
        "otel.o11y.svc:0",
        "otel.o11y.svc.example.com:4317",
        "a.b.o11y.svc:4317",
        "http://otel.o11y.svc:4317",
    ] {
        let message = rejection(section(endpoint(address)));
        let start = format!("spec.telemetry.tracing.provider.endpoint: {address:?} {expected}");
        assert!(message.starts_with(&start), "{message}");
    }
    for (value, expected) in [
        (
            json!({"tracing": {}}),
            "spec.telemetry.tracing.provider: \"\" is not set",
        ),
        (
            json!({"dump": {}}),
            "spec.telemetry.dump.mode: \"\" is not Full, Headers or Off",
        ),
        (
            json!({"dump": {"mode": "Full", "status": "6xx"}}),
            "spec.telemetry.dump.status: \"600-699\" is not a status from 100 to 599",
        ),
        (
            json!({"dump": {"mode": "Full", "status": "some"}}),
            "spec.telemetry.dump.status: \"some\" is not a status such as 500",
        ),
        (
            json!({"dump": {"mode": "Full", "caller": "shop/"}}),
            "spec.telemetry.dump.caller: \"shop/\" is not a namespace",
        ),
        (
            json!({"dump": {"mode": "Full", "body": true}}),
            "spec.telemetry.dump.body: unknown field",
        ),
        (
            json!({"accessLogs": {"format": "{user}"}}),
            "spec.telemetry.accessLogs.format: \"{user}\" is not valid: {user} is not a field; \
             the fields are time, duration_ms,",
        ),
        (
            json!({"accessLogs": {"matches": "Some"}}),
            "spec.telemetry.accessLogs.matches: \"Some\" is not All or Failures",
        ),
    ] {
        let message = rejection(section(value));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn parts_of_a_service_replace_those_of_its_namespace() {
    let own = settings(section(json!({
        "dump": {"mode": "Full"}, "accessLogs": {"mode": "Off"},
    })));
    let inherited = settings(section(json!({
        "accessLogs": {"format": "JSON"},
        "tracing": {"provider": {"endpoint": "otel.o11y.svc:4317"}},
    })));
    let effective = Effective::of(Some(&own), Some(&inherited)).unwrap();
    assert!(!effective.concerns_clients());
    let telemetry = effective.telemetry.unwrap();
    assert_eq!(telemetry.name, "TrafficPolicy shop/p, TrafficPolicy shop/p");
    let compiled = Telemetry::compile(&telemetry).unwrap();
    assert!(compiled.dump.is_some() && compiled.access_logs.is_none());
    assert!(compiled.tracing.is_some());
}

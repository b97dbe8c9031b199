//! Tables of policies: parsing, defaults of fields, merging of sections and of rules.

pub(crate) mod crd;
mod rejections;
mod telemetry;

use serde_json::{Value, json};

use super::*;
use crate::object::{Kind, Meta};
use rejections::rejections;

/// A policy in `shop` for the Service `web`.
pub(crate) fn policy(name: &str, created: i64, sections: Value) -> Policy {
    let targets = json!([{"group": "", "kind": "Service", "name": "web"}]);
    policy_for(name, created, targets, sections)
}

pub(crate) fn policy_for(name: &str, created: i64, targets: Value, sections: Value) -> Policy {
    let mut spec = json!({"targetRefs": targets});
    let sections = sections.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(sections);
    parsed(name, created, 7, &spec).unwrap()
}

/// A policy in this generation.
pub(crate) fn parsed(
    name: &str,
    created: i64,
    generation: i64,
    spec: &Value,
) -> Result<Policy, String> {
    let key = Key::new("shop", name);
    let (kind, spec) = (Kind::TrafficPolicy, spec.to_string());
    let meta = Meta::new(kind, key, created, ("", generation), &spec);
    parse::policy(meta, &spec)
}

fn settings(sections: Value) -> Arc<Settings> {
    policy("p", 0, sections).content.unwrap()
}

fn rejection(sections: Value) -> String {
    let invalid = policy("p", 0, sections).invalid;
    invalid.map_or("valid".into(), |rejection| rejection.message)
}

#[test]
fn every_section_is_parsed() {
    let all = settings(json!({
        "loadBalancing": {"algorithm": "ConsistentHash", "hash": {"header": "X-User"},
            "zonePreference": "Prefer", "slowStart": "10s"},
        "connections": {"maxConnections": 1, "maxHttp2Connections": 2, "maxRequests": 3,
            "maxWaiting": 0, "connectTimeout": "5s"},
        "outlierDetection": {"consecutiveFailures": 0, "failurePercent": 50, "minRequests": 20,
            "interval": "10s", "latencyPercent": 400, "ejectionTime": "10s",
            "maxEjectionTime": "300s", "maxEjectedPercent": 50},
        "circuitBreaker": {"failurePercent": 50, "openTime": "5s"},
        "retry": {"codes": [503], "attempts": 2, "backoff": "25ms",
            "budget": {"percent": 20, "minPerSecond": 1}},
        "timeouts": {"request": "10s", "backendRequest": "2s"},
        "sessionPersistence": {"sessionName": "s", "absoluteTimeout": "1h", "idleTimeout": "10m"},
        "rateLimits": [{"name": "per-caller", "matches": [{"method": "GET"}], "requests": 100,
            "burst": 200, "per": "Caller"}],
        "faults": [{"delay": {"duration": "100ms", "percent": 10},
            "abort": {"status": 503, "fraction": {"numerator": 1, "denominator": 1000}}}],
    }));
    let balancing = all.balancing.as_ref().unwrap();
    let header = proto::hash_key::Kind::Header("x-user".into());
    assert_eq!(balancing.hash_key.as_ref().unwrap().kind, Some(header));
    assert_eq!(
        (balancing.prefer_zone, balancing.slow_start),
        (true, Some(10_000))
    );
    assert_eq!(all.connections.unwrap().connect_timeout, Some(5_000));
    assert_eq!(all.connections.unwrap().max_waiting, Some(0));
    let outlier = all.outlier_detection.unwrap();
    assert_eq!(
        (outlier.consecutive_failures, outlier.latency_percent),
        (Some(0), Some(400))
    );
    assert_eq!(outlier.max_ejection_time, Some(300_000));
    let breaker = all.circuit_breaker.unwrap();
    assert_eq!((breaker.failure_percent, breaker.interval), (50, None));
    let retry = all.retry.as_ref().unwrap();
    assert_eq!(retry.retry.as_ref().unwrap().backoff, 25);
    assert_eq!(retry.budget.unwrap().percent, Some(20));
    assert_eq!(all.timeouts, Some([Some(10_000), Some(2_000)]));
    let session = all.session.as_ref().unwrap();
    assert_eq!((&*session.cookie, session.idle_timeout), ("s", 600_000));
    let [limit] = &**all.rate_limits.as_ref().unwrap() else {
        panic!("one limit")
    };
    assert_eq!(limit.name, "TrafficPolicy shop/p/per-caller");
    assert_eq!(
        (limit.window, limit.burst, limit.matches.len()),
        (1_000, 200, 1)
    );
    assert_eq!(limit.scope(), proto::rate_limit::Scope::Caller);
    let [fault] = &all.faults.as_ref().unwrap().list[..] else {
        panic!("one fault")
    };
    let share = |numerator, denominator| {
        Some(proto::Share {
            numerator,
            denominator,
        })
    };
    assert_eq!((fault.delay, fault.delayed), (100, share(10, 100)));
    assert_eq!((fault.abort_status, fault.aborted), (503, share(1, 1000)));
}

#[test]
fn condition_of_a_policy_with_a_megabyte_of_unknown_fields_is_short() {
    let long = "x".repeat(1024 * 1024);
    let many: serde_json::Map<_, _> = (0..100_000)
        .map(|number| (format!("f{number}"), json!(0)))
        .collect();
    for connections in [json!({long: 0}), Value::Object(many)] {
        let message = rejection(json!({"connections": connections}));
        assert!(message.starts_with("spec.connections."), "{message:.100}");
        assert!(message.len() <= 512, "{} bytes", message.len());
    }
}

#[test]
fn invalid_fields_are_named_with_their_value_and_the_expected_one() {
    let wrong = rejections().into_iter().filter_map(|one| {
        let (actual, expected) = (rejection(one.spec), one.message);
        (!actual.starts_with(expected)).then(|| format!("{actual}\nexpected {expected}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let stored = rejections().into_iter().filter_map(|one| one.stored);
    assert!(stored.count() > 0, "expressions are left to the controller");
    let big = vec![json!({"name": "h", "value": "x".repeat(4096)}); 16];
    let abort = json!({"status": 503});
    let faults = json!([{"abort": abort, "matches": [{"headers": big}]}]);
    for sections in [json!({}), json!({"faults": faults})] {
        assert_eq!(rejection(sections), "valid");
    }
}

/// Fragments of messages that are impossible with the fields of policies, or that are about
/// targets.
const OTHER_MESSAGES: [&str; 10] = [
    "spec.targetRefs",
    "a known algorithm",
    "of a cookie or of a header, not of both",
    "one of header, cookie and source",
    "a list of 1 to 16 targets",
    "a list without duplicates",
    "the section has no effect",
    "these sections have no effect",
    // The name of the message.
    "delay.percent",
    "abort.percent",
];

#[test]
fn each_message_of_the_parser_has_a_rejected_policy() {
    let sources = [
        include_str!("parse.rs"),
        include_str!("../../../../proto/src/policy.rs"),
    ];
    let messages: Vec<String> = rejections()
        .into_iter()
        .map(|one| rejection(one.spec))
        .collect();
    let (mut count, mut missing) = (0, Vec::new());
    for source in sources {
        let code = source.split("#[cfg(test)]").next().unwrap();
        let lines = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        for line in lines {
            // Texts of messages have spaces or dots, and no placeholders.
            for text in line.split('"').skip(1).step_by(2) {
                let is_message = text.contains([' ', '.']) && !text.contains(['{', '\\', '`']);
                if !is_message || OTHER_MESSAGES.contains(&text) {
                    continue;
                }
                count += 1;
                if !messages.iter().any(|message| message.contains(text)) {
                    missing.push(text);
                }
            }
        }
    }
    assert!(
        missing.is_empty(),
        "no policy in rejections.rs gets the messages {missing:?}"
    );
    assert!(count > 40, "{count} messages");
}

#[test]
fn large_policies_are_rejected_whatever_their_parts_are() {
    let headers: Vec<Value> = (0..16)
        .map(|number| json!({"name": format!("h{number}"), "value": "x".repeat(4096)}))
        .collect();
    let one = json!({"headers": headers});
    let faults = json!([{"abort": {"status": 503}, "matches": [one, one]}]);
    let message = rejection(json!({"faults": faults}));
    assert!(
        message.contains("encoded bytes in the policy are more than 65536"),
        "{message}"
    );
}

#[test]
fn targets_are_services_of_the_namespace_or_the_namespace() {
    let of = |targets: Value| {
        let policy = policy_for("p", 0, targets, json!({}));
        let message = policy.content.err().map(|rejection| rejection.message);
        (policy.parents.len(), message.unwrap_or_default())
    };
    let service = |name: &str| json!({"group": "", "kind": "Service", "name": name});
    let namespace = |name: &str| json!({"group": "", "kind": "Namespace", "name": name});
    assert_eq!(
        of(json!([service("web"), namespace("shop")])),
        (2, String::new())
    );
    for (targets, count, expected) in [
        (
            json!([]),
            0,
            "spec.targetRefs: \"\" is not a list of 1 to 16 targets",
        ),
        (
            json!([service("web"), namespace("bank")]),
            2,
            "spec.targetRefs[1]: \"Namespace bank\" is not a Service of the namespace, or \
             Namespace shop",
        ),
        (
            json!([{"group": "apps", "kind": "Service", "name": "web"}]),
            1,
            "spec.targetRefs[0]: \"Service web\" is not a Service of the namespace, or \
             Namespace shop",
        ),
        (
            json!([service("web"), service("web")]),
            1,
            "spec.targetRefs: \"\" is not a list without duplicates",
        ),
        (
            json!(vec![service("web"); 17]),
            1,
            "spec.targetRefs: 17 entries are more than 16",
        ),
    ] {
        assert_eq!(of(targets), (count, expected.to_owned()));
    }
    let foreign = json!({"targetRefs": [{"kind": "Service", "name": "web", "namespace": "bank"}]});
    let error = parsed("p", 0, 1, &foreign).unwrap_err();
    assert!(error.contains("unknown field `namespace`"), "{error}");
}

#[test]
fn sections_of_a_service_replace_those_of_its_namespace() {
    let own = settings(json!({
        "connections": {"maxRequests": 1}, "timeouts": {"request": "1s"}, "faults": [],
    }));
    let inherited = settings(json!({
        "connections": {"maxWaiting": 5},
        "circuitBreaker": {"failurePercent": 50},
        "timeouts": {"backendRequest": "5s"},
        "faults": [{"abort": {"status": 503}}],
        "rateLimits": [{"name": "a", "requests": 1}],
    }));
    let effective = Effective::of(Some(&own), Some(&inherited)).unwrap();
    let backend = effective.backend.unwrap();
    assert_eq!(backend.name, "TrafficPolicy shop/p, TrafficPolicy shop/p");
    assert_eq!(backend.connections.unwrap().max_waiting, None);
    assert_eq!(backend.circuit_breaker.unwrap().failure_percent, 50);
    assert_eq!(effective.requests.settings.timeouts, [Some(1_000), None]);
    assert_eq!(
        effective.requests.faults, None,
        "an empty list replaces them too"
    );
    assert_eq!(effective.rate_limits.unwrap().len(), 1);
    assert_eq!(Effective::of(None, None), None);
    let only_retries = settings(json!({"retry": {"attempts": 1}}));
    let effective = Effective::of(Some(&only_retries), None).unwrap();
    assert_eq!(effective.backend, None, "retries are settings of requests");
}

#[test]
fn rules_keep_what_they_have_and_get_the_rest_from_the_policy() {
    let policy = settings(json!({
        "retry": {"codes": [503]},
        "timeouts": {"request": "10s", "backendRequest": "2s"},
        "sessionPersistence": {},
    }));
    let requests = Effective::of(Some(&policy), None).unwrap().requests;
    let complete = |own: RequestSettings| own.or(&requests.settings);
    let completed = complete(RequestSettings::default());
    assert_eq!(completed.timeouts, [Some(10_000), Some(2_000)]);
    assert_eq!(completed.retry.as_ref().unwrap().statuses, [503]);
    assert_eq!(completed.session.as_ref().unwrap().cookie, "mesh-session");
    let own = RequestSettings {
        timeouts: [Some(1_000), None],
        retry: Some(proto::RouteRetry {
            statuses: vec![],
            attempts: 0,
            backoff: 0,
        }),
        ..RequestSettings::default()
    };
    let completed = complete(own.clone());
    assert_eq!(
        completed.timeouts,
        [Some(1_000), Some(1_000)],
        "at most the timeout of the request"
    );
    assert_eq!(completed.retry, own.retry);
    let none = complete(RequestSettings {
        timeouts: [Some(0), None],
        ..RequestSettings::default()
    });
    assert_eq!(
        none.timeouts,
        [Some(0), Some(2_000)],
        "the rule has none on purpose"
    );
    assert_eq!(own.or(&RequestSettings::default()), own);
}

/// The definition refuses it when it is written.
#[test]
fn stored_fault_without_a_share_concerns_all_requests() {
    let all = settings(json!({"faults": [{"delay": {"duration": "1s"}}]}));
    let fault = &all.faults.as_ref().unwrap().list[0];
    let share = fault.delayed.unwrap();
    assert_eq!((share.numerator, share.denominator), (100, 100));
    // In the wrong place.
    let misplaced = json!({"faults": [{"percent": 10, "abort": {"status": 503}}]});
    let expected = "spec.faults[0].percent: unknown field";
    assert!(rejection(misplaced).starts_with(expected));
}

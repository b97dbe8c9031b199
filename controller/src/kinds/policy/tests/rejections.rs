//! Policies that the controller rejects: at least one for each of its messages. Tests compare the
//! controller with the API server, which refuses them when they are written.

use serde_json::{Value, json};

/// An invalid policy.
pub struct Rejected {
    /// Its section.
    pub spec: Value,
    /// The beginning of the message of the controller.
    pub message: &'static str,
    /// Why no rule of the definition expresses it, so that the API server stores it.
    pub stored: Option<&'static str>,
}

/// Invalid policies for a Service.
pub fn rejections() -> Vec<Rejected> {
    let refused = refused().into_iter().map(|(spec, message)| Rejected {
        spec,
        message,
        stored: None,
    });
    let stored = stored()
        .into_iter()
        .map(|(spec, message, reason)| Rejected {
            spec,
            message,
            stored: Some(reason),
        });
    refused.chain(stored).collect()
}

fn many(count: usize, one: Value) -> Value {
    vec![one; count].into()
}

fn fault(one: Value) -> Value {
    json!({"faults": [{"abort": {"status": 503, "percent": 1}, "matches": [one]}]})
}

fn limits(count: usize) -> Value {
    let limit = |number| json!({"name": format!("l{number}"), "requests": 1});
    (0..count).map(limit).collect()
}

fn limit(field: &str, value: Value) -> Value {
    let mut limit = json!({"name": "a", "requests": 1});
    limit[field] = value;
    json!({"rateLimits": [limit]})
}

fn stored() -> Vec<(Value, &'static str, &'static str)> {
    let regex = |text: &str| json!({"type": "RegularExpression", "value": text});
    let header = json!({"type": "RegularExpression", "name": "a", "value": "("});
    let syntax = "CEL does not bound the size of a compiled expression";
    let cost = "exceeds the budget of CEL for nested lists";
    let headers: Vec<Value> = (0..16)
        .map(|number| json!({"name": format!("h{number}"), "value": "x".repeat(4096)}))
        .collect();
    vec![
        (
            fault(json!({"path": regex("(")})),
            "spec.faults[0].matches[0].path.value: \"(\" is not a regular expression: ",
            syntax,
        ),
        (
            fault(json!({"headers": [header]})),
            "spec.faults[0].matches[0].headers[0].value: \"(\" is not a regular expression: ",
            syntax,
        ),
        (
            json!({"faults": [
                {"abort": {"status": 503, "percent": 1}, "matches": many(33, json!({"path": regex("a")}))},
                {"abort": {"status": 503, "percent": 1}, "matches": many(32, json!({"path": regex("a")}))},
            ]}),
            "spec.faults[1].matches: 65 regular expressions in the policy are more than 64",
            cost,
        ),
        (
            json!({"faults": [{"abort": {"status": 503, "percent": 1},
                "matches": many(2, json!({"headers": headers}))}]}),
            "spec.faults: 131",
            cost,
        ),
    ]
}

fn refused() -> Vec<(Value, &'static str)> {
    let hash =
        |hash: Value| json!({"loadBalancing": {"algorithm": "ConsistentHash", "hash": hash}});
    let delay = |delay: Value| json!({"faults": [{"delay": delay}]});
    let abort = |abort: Value| json!({"faults": [{"abort": abort}]});
    let session = |session: Value| json!({"sessionPersistence": session});
    let path = |kind: &str, value: &str| fault(json!({"path": {"type": kind, "value": value}}));
    let matching =
        |count| json!({"abort": {"status": 503, "percent": 1}, "matches": many(count, json!({}))});
    let called_by = json!([{"headers": [{"name": "X_Called-By", "value": "a"}]}]);
    vec![
        // The structure.
        (json!({"unknown": 1}), "spec.unknown: unknown field"),
        (
            json!({"connections": {"maxRequest": 1}}),
            "spec.connections.maxRequest: unknown field",
        ),
        (
            json!({"connections": {"maxRequests": "1"}}),
            "spec.connections.maxRequests: invalid type",
        ),
        (
            json!({"connections": {"maxRequests": -1}}),
            "spec.connections.maxRequests: invalid value",
        ),
        (
            json!({"backend": {"type": "ExternalHostname", "port": {"port": 443},
                "externalHostname": {"hostname": "api.example.com"}}}),
            "spec.backend: \"set\" is not absent in a policy with targetRefs",
        ),
        // Load balancing.
        (
            json!({"loadBalancing": {"algorithm": "Magic"}}),
            "spec.loadBalancing.algorithm: \"Magic\" is not PeakEwma, LeastRequest, RoundRobin or ConsistentHash",
        ),
        (
            json!({"loadBalancing": {"zonePreference": "Always"}}),
            "spec.loadBalancing.zonePreference: \"Always\" is not None or Prefer",
        ),
        (
            json!({"loadBalancing": {"algorithm": "ConsistentHash"}}),
            "spec.loadBalancing.hash: \"\" is not set, which ConsistentHash requires",
        ),
        (
            json!({"loadBalancing": {"hash": {"source": {}}}}),
            "spec.loadBalancing.hash: \"set\" is not absent, without ConsistentHash",
        ),
        (
            hash(json!({"source": {}, "header": "a"})),
            "spec.loadBalancing.hash: \"\" is not exactly one of header, cookie and source",
        ),
        (
            hash(json!({})),
            "spec.loadBalancing.hash: \"\" is not exactly one of header, cookie and source",
        ),
        (
            hash(json!({"header": "a b"})),
            "spec.loadBalancing.hash.header: \"a b\" is not a name of at most 128 characters",
        ),
        (
            hash(json!({"cookie": "x".repeat(129)})),
            "spec.loadBalancing.hash.cookie: \"xxx",
        ),
        (
            json!({"loadBalancing": {"slowStart": "25h"}}),
            "spec.loadBalancing.slowStart: \"90000000ms\" is not from 1ms to 24h",
        ),
        // Limits of connections, and failures.
        (
            json!({"connections": {"maxConnections": 0}}),
            "spec.connections.maxConnections: \"0\" is not from 1 to 1000000",
        ),
        (
            json!({"connections": {"maxHttp2Connections": 0}}),
            "spec.connections.maxHttp2Connections: \"0\" is not from 1 to 1000000",
        ),
        (
            json!({"connections": {"maxRequests": 0}}),
            "spec.connections.maxRequests: \"0\" is not from 1 to 1000000",
        ),
        (
            json!({"connections": {"maxWaiting": 1_000_001}}),
            "spec.connections.maxWaiting: \"1000001\" is not from 0 to 1000000",
        ),
        (
            json!({"connections": {"connectTimeout": "0s"}}),
            "spec.connections.connectTimeout: \"0ms\" is not from 1ms to 24h",
        ),
        (
            json!({"connections": {"connectTimeout": "100000ms"}}),
            "spec.connections.connectTimeout: \"100000ms\" is not a duration, for example \"1m30s\" or \"500ms\"",
        ),
        (
            json!({"outlierDetection": {"consecutiveFailures": 1001}}),
            "spec.outlierDetection.consecutiveFailures: \"1001\" is not from 0 to 1000",
        ),
        (
            json!({"outlierDetection": {"failurePercent": 101}}),
            "spec.outlierDetection.failurePercent: \"101\" is not from 0 to 100",
        ),
        (
            json!({"outlierDetection": {"minRequests": 0}}),
            "spec.outlierDetection.minRequests: \"0\" is not from 1 to 1000000",
        ),
        (
            json!({"outlierDetection": {"interval": "0s"}}),
            "spec.outlierDetection.interval: \"0ms\" is not from 1ms to 24h",
        ),
        (
            json!({"outlierDetection": {"latencyPercent": 199}}),
            "spec.outlierDetection.latencyPercent: \"199\" is not 0, or from 200 to 10000",
        ),
        (
            json!({"outlierDetection": {"ejectionTime": "25h"}}),
            "spec.outlierDetection.ejectionTime: \"90000000ms\" is not from 1ms to 24h",
        ),
        (
            json!({"outlierDetection": {"maxEjectionTime": "0h"}}),
            "spec.outlierDetection.maxEjectionTime: \"0ms\" is not from 1ms to 24h",
        ),
        (
            json!({"outlierDetection": {"maxEjectedPercent": 101}}),
            "spec.outlierDetection.maxEjectedPercent: \"101\" is not from 0 to 100",
        ),
        (
            json!({"circuitBreaker": {}}),
            "spec.circuitBreaker.failurePercent: \"0\" is not from 1 to 100",
        ),
        (
            json!({"circuitBreaker": {"failurePercent": 50, "minRequests": 0}}),
            "spec.circuitBreaker.minRequests: \"0\" is not from 1 to 1000000",
        ),
        (
            json!({"circuitBreaker": {"failurePercent": 50, "interval": "0s"}}),
            "spec.circuitBreaker.interval: \"0ms\" is not from 1ms to 24h",
        ),
        (
            json!({"circuitBreaker": {"failurePercent": 50, "openTime": "0s"}}),
            "spec.circuitBreaker.openTime: \"0ms\" is not from 1ms to 24h",
        ),
        (
            json!({"retry": {"codes": many(65, json!(503))}}),
            "spec.retry.codes: 65 entries are more than 64",
        ),
        (
            json!({"retry": {"codes": [200]}}),
            "spec.retry.codes: \"200\" is not a status from 400 to 599",
        ),
        (
            json!({"retry": {"attempts": 11}}),
            "spec.retry.attempts: \"11\" is not at most 10",
        ),
        (
            json!({"retry": {"backoff": "1"}}),
            "spec.retry.backoff: \"1\" is not a duration",
        ),
        (
            json!({"retry": {"budget": {"percent": 101}}}),
            "spec.retry.budget.percent: \"101\" is not from 0 to 100",
        ),
        (
            json!({"retry": {"budget": {"minPerSecond": 1_000_001}}}),
            "spec.retry.budget.minPerSecond: \"1000001\" is not from 0 to 1000000",
        ),
        (
            json!({"timeouts": {"request": "1s", "backendRequest": "2s"}}),
            "spec.timeouts.backendRequest: \"2000ms\" is not at most the request timeout",
        ),
        // Sessions.
        (
            session(json!({"type": "Query"})),
            "spec.sessionPersistence.type: \"Query\" is not Cookie or Header",
        ),
        (
            session(json!({"cookieConfig": {"lifetimeType": "Long"}})),
            "spec.sessionPersistence.cookieConfig.lifetimeType: \"Long\" is not Session or Permanent",
        ),
        (
            session(json!({"cookieConfig": {"lifetimeType": "Permanent"}})),
            "spec.sessionPersistence.absoluteTimeout: \"\" is not set, for a permanent cookie",
        ),
        (
            session(
                json!({"cookieConfig": {"lifetimeType": "Permanent"}, "absoluteTimeout": "0s"}),
            ),
            "spec.sessionPersistence.absoluteTimeout: \"\" is not set, for a permanent cookie",
        ),
        (
            session(
                json!({"type": "Header", "cookieConfig": {"lifetimeType": "Permanent"},
                "absoluteTimeout": "1h"}),
            ),
            "spec.sessionPersistence.absoluteTimeout: \"\" is not set, for a permanent cookie",
        ),
        (
            session(json!({"sessionName": ""})),
            "spec.sessionPersistence.sessionName: \"\" is not a name of at most 128 characters",
        ),
        (
            session(json!({"type": "Header", "sessionName": "X_Called-By"})),
            "spec.sessionPersistence.sessionName: \"X_Called-By\" is not a header that routes may set",
        ),
        (
            session(json!({"absoluteTimeout": "8761h"})),
            "spec.sessionPersistence.absoluteTimeout: \"31539600000ms\" is not at most 8760h",
        ),
        (
            session(json!({"idleTimeout": "8761h"})),
            "spec.sessionPersistence.idleTimeout: \"31539600000ms\" is not at most 8760h",
        ),
        // Rate limits.
        (
            json!({"rateLimits": limits(17)}),
            "spec.rateLimits: 17 entries are more than 16",
        ),
        (
            json!({"rateLimits": [{"name": "a", "requests": 1}, {"name": "a", "requests": 1}]}),
            "spec.rateLimits[1].name: \"a\" is not a name in lower case, which no other limit of the policy has",
        ),
        (
            limit("name", json!("a..b")),
            "spec.rateLimits[0].name: \"a..b\" is not a name in lower case",
        ),
        (
            limit("name", json!("a.-b")),
            "spec.rateLimits[0].name: \"a.-b\" is not a name in lower case",
        ),
        (
            limit("per", json!("Node")),
            "spec.rateLimits[0].per: \"Node\" is not Service or Caller",
        ),
        (
            limit("requests", json!(0)),
            "spec.rateLimits[0].requests: \"0\" is not from 1 to 1000000000",
        ),
        (
            limit("window", json!("0s")),
            "spec.rateLimits[0].window: \"0ms\" is not from 1ms to 24h",
        ),
        (
            limit("burst", json!(1_000_000_001)),
            "spec.rateLimits[0].burst: \"1000000001\" is not from 0 to 1000000000",
        ),
        (
            limit("matches", called_by),
            "spec.rateLimits[0].matches: \"x_called-by\" is not a header of clients: set `per: Caller`",
        ),
        (
            json!({"rateLimits": [
                {"name": "a", "requests": 1, "matches": many(64, json!({}))},
                {"name": "b", "requests": 1, "matches": many(64, json!({}))},
                {"name": "c", "requests": 1, "matches": [{}]},
            ]}),
            "spec.rateLimits[2].matches: 129 matches in the policy are more than 128",
        ),
        // Faults.
        (
            json!({"faults": many(17, json!({"abort": {"status": 503, "percent": 1}}))}),
            "spec.faults: 17 entries are more than 16",
        ),
        (
            json!({"faults": [matching(64), matching(64), matching(1)]}),
            "spec.faults[2].matches: 129 matches in the policy are more than 128",
        ),
        (
            json!({"faults": [{}]}),
            "spec.faults[0].delay: \"\" is not set, or abort",
        ),
        (
            delay(json!({"duration": "0s", "percent": 1})),
            "spec.faults[0].delay.duration: \"0ms\" is not at least 1ms",
        ),
        (
            delay(json!({"duration": "25h", "percent": 1})),
            "spec.faults[0].delay.duration: \"90000000ms\" is not from 1ms to 24h",
        ),
        (
            delay(json!({"duration": "1s", "percent": 1, "fraction": {"numerator": 1}})),
            "spec.faults[0].delay: \"\" is not one of percent and fraction",
        ),
        (
            abort(json!({"percent": 1})),
            "spec.faults[0].abort.status: \"0\" is not a status from 400 to 599",
        ),
        (
            abort(json!({"status": 200, "percent": 1})),
            "spec.faults[0].abort.status: \"200\" is not from 400 to 599",
        ),
        (
            abort(json!({"status": 503, "percent": 101})),
            "spec.faults[0].abort: \"101/100\" is not a share of at most 1",
        ),
        (
            abort(json!({"status": 503, "fraction": {"numerator": 1, "denominator": 0}})),
            "spec.faults[0].abort: \"1/0\" is not a share of at most 1",
        ),
        (
            abort(json!({"status": 503, "fraction": {"numerator": 101}})),
            "spec.faults[0].abort: \"101/100\" is not a share of at most 1",
        ),
        // Matches.
        (
            fault(json!({"method": "get"})),
            "spec.faults[0].matches[0].method: \"get\" is not a method",
        ),
        (
            path("Glob", "/a"),
            "spec.faults[0].matches[0].path.type: \"Glob\" is not a type of path match",
        ),
        (
            path("Exact", "a"),
            "spec.faults[0].matches[0].path.value: \"a\" is not a path that begins with",
        ),
        (
            path("PathPrefix", "/a//b"),
            "spec.faults[0].matches[0].path.value: \"/a//b\" is not a path",
        ),
        (
            path("PathPrefix", "/a/.."),
            "spec.faults[0].matches[0].path.value: \"/a/..\" is not a path",
        ),
        (
            path("PathPrefix", "/./a"),
            "spec.faults[0].matches[0].path.value: \"/./a\" is not a path",
        ),
        (
            path("Exact", "/a%2Fb"),
            "spec.faults[0].matches[0].path.value: \"/a%2Fb\" is not a path",
        ),
        (
            path("Exact", "/a?b"),
            "spec.faults[0].matches[0].path.value: \"/a?b\" is not a path",
        ),
        (
            fault(json!({"path": {"value": "/a b"}})),
            "spec.faults[0].matches[0].path.value: \"/a b\" is not a path",
        ),
        (
            fault(json!({"headers": many(17, json!({"name": "a", "value": "b"}))})),
            "spec.faults[0].matches[0].headers: 17 entries are more than 16",
        ),
        (
            fault(json!({"headers": [{"name": "a b", "value": "c"}]})),
            "spec.faults[0].matches[0].headers[0].name: \"a b\" is not the name of a header",
        ),
        (
            fault(json!({"queryParams": [{"name": "a b", "value": "c"}]})),
            "spec.faults[0].matches[0].queryParams[0].name: \"a b\" is not the name of a query parameter",
        ),
        (
            fault(json!({"headers": [{"type": "Glob", "name": "a", "value": "b"}]})),
            "spec.faults[0].matches[0].headers[0].type: \"Glob\" is not Exact or RegularExpression",
        ),
        (
            fault(json!({"headers": [{"name": "a", "value": ""}]})),
            "spec.faults[0].matches[0].headers[0].value: \"\" is not a value of 1 to 4096 bytes",
        ),
        (
            fault(json!({"headers": [{"name": "a", "value": "x".repeat(4097)}]})),
            "spec.faults[0].matches[0].headers[0].value: \"xxx",
        ),
    ]
}

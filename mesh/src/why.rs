//! Why did this exchange do that? One page from the records of its two proxies. Pure.

use std::fmt::Write as _;

use diy_mesh_model::code::Code;
use diy_mesh_model::exchange::{Attempt, Direction, Exchange, Failure};

/// The record of an exchange at one proxy.
#[derive(Clone, Debug)]
pub struct Record {
    /// Namespace and name of the pod.
    pub pod: String,
    /// The record.
    pub exchange: Exchange,
}

/// The known records of an exchange.
#[derive(Clone, Debug, Default)]
pub struct Story {
    /// The record of the caller's proxy.
    pub caller: Option<Record>,
    /// The record of the callee's proxy.
    pub callee: Option<Record>,
    /// Why a record is missing.
    pub missing: Vec<String>,
}

impl Story {
    /// One page in plain text.
    pub fn page(&self) -> String {
        let mut page = String::new();
        let records = || self.caller.iter().chain(&self.callee);
        if let Some(record) = records().next() {
            page += &record.title();
            page += &format!("\nWhy: {}\n", self.cause());
        }
        for record in records() {
            page.push('\n');
            page += &record.text();
        }
        for missing in &self.missing {
            page += &format!("\n{missing}\n");
        }
        page
    }

    /// Whether the exchange failed, as far as it is known.
    pub fn is_failure(&self) -> bool {
        let mut records = self.caller.iter().chain(&self.callee);
        records.any(|record| record.exchange.is_failure())
    }

    /// The proxy that is nearer to the application knows better. A failure at the callee reaches the
    /// caller as a response.
    fn cause(&self) -> String {
        let records = || self.callee.iter().chain(&self.caller);
        let failed = records().find_map(Record::cause);
        failed.unwrap_or_else(|| match records().find_map(|one| one.exchange.status()) {
            Some(status) if records().any(|one| one.exchange.incomplete.is_some()) => {
                format!("the response, {status}, did not arrive completely")
            }
            Some(status) if self.is_failure() => match &self.callee {
                Some(_) => format!("the application answered {status}, and the mesh passed it on"),
                None => format!("the upstream answered {status}, and the proxy passed it on"),
            },
            Some(status) => match records().find_map(|one| one.exchange.failed_attempt()) {
                Some((number, attempt)) => {
                    let attempt = attempt_text(number, attempt);
                    format!("it did not fail: {status}, by a retry after attempt {attempt}")
                }
                None => format!("it did not fail: {status}"),
            },
            None if records().any(|one| one.exchange.opaque.is_some()) => "it did not fail".into(),
            None => "the client left before there was a response".into(),
        })
    }
}

/// The failure in the words of the table of codes.
fn with_meaning(mut text: String, code: &str) -> String {
    if let Some(code) = Code::of(code) {
        let check = code.check();
        let (check, _link) = check.split_once(" ([").unwrap_or((check, ""));
        let _ = write!(text, "\n  Meaning: {}\n  Check:   {check}", code.meaning());
    }
    text
}

impl Record {
    /// The failure at this proxy, or at the callee's according to its response.
    fn cause(&self) -> Option<String> {
        let Some(Failure { code, message }) = &self.exchange.failure else {
            let code = self.exchange.peer_error()?.label();
            let text = format!("the proxy of the callee answered {code}");
            return Some(with_meaning(text, code));
        };
        let side = match self.exchange.direction {
            Direction::Inbound => "callee",
            Direction::Outbound => "caller",
        };
        let is_cut_off = self.exchange.course.as_ref().is_some_and(|one| one.cut_off);
        let did = match self.exchange.status().filter(|_| is_cut_off) {
            Some(status) => format!("cut off the response, {status}:"),
            None if is_cut_off => "closed the connection:".into(),
            None => "answered".into(),
        };
        let text = format!("the proxy of the {side} {did} {code}: {message}");
        Some(with_meaning(text, code))
    }

    fn title(&self) -> String {
        let exchange = &self.exchange;
        let status = exchange.status().unwrap_or_else(|| "no response".into());
        let id = exchange.id.map_or_else(String::new, |id| id.to_string());
        let subject = exchange.subject();
        let (time, duration) = (&exchange.time, exchange.duration_ms);
        format!("{subject}: {status} after {duration:.3} ms, at {time}\nExchange {id}\n")
    }

    fn text(&self) -> String {
        let exchange = &self.exchange;
        let (side, lines) = match exchange.direction {
            Direction::Outbound => ("caller", self.outbound()),
            Direction::Inbound => ("callee", self.inbound()),
        };
        let mut text = format!("Proxy of the {side}, {}\n", self.pod);
        for (name, value) in lines.into_iter().chain(self.end()) {
            text += &format!("  {name:<12} {value}\n");
        }
        text
    }

    fn outbound(&self) -> Vec<(&'static str, String)> {
        let exchange = &self.exchange;
        let course = exchange.course.as_ref();
        let service = course.map_or("", |course| &course.service);
        let mut lines = vec![(
            "destination",
            format!("{service} ({})", exchange.destination),
        )];
        if let Some(route) = &exchange.route {
            let to = exchange.backend.as_deref().unwrap_or("the destination");
            lines.push(("route", format!("{route}, to {to}")));
        }
        if let Some(fault) = &exchange.fault {
            lines.push(("fault", fault.policy.clone()));
        }
        let attempts = course.map_or(&[][..], |course| &course.attempts);
        if attempts.is_empty() {
            lines.push(("attempts", "none: nothing was sent".into()));
        }
        for (number, attempt) in (1..).zip(attempts) {
            lines.push(("attempt", attempt_text(number, attempt)));
        }
        lines
    }

    fn inbound(&self) -> Vec<(&'static str, String)> {
        let exchange = &self.exchange;
        let identity = match &exchange.identity {
            Some(identity) => format!("{identity}, verified by mutual TLS"),
            None => "not authenticated: no mutual TLS".into(),
        };
        vec![
            ("client", format!("{} ({identity})", exchange.peer)),
            ("application", exchange.destination.to_string()),
        ]
    }

    fn end(&self) -> Vec<(&'static str, String)> {
        let exchange = &self.exchange;
        let responded = exchange
            .course
            .as_ref()
            .and_then(|course| course.responded_ms);
        let mut lines = Vec::new();
        if let (Some(status), Some(responded)) = (exchange.status(), responded) {
            let ended = exchange.duration_ms;
            let text = format!("{status} after {responded:.3} ms, complete after {ended:.3} ms");
            lines.push(("response", text));
        }
        if let Some(Failure { code, message }) = &exchange.failure {
            lines.push(("failure", format!("{code}: {message}")));
        }
        if let Some(reason) = &exchange.incomplete {
            lines.push(("incomplete", reason.clone()));
        }
        lines
    }
}

fn attempt_text(number: usize, attempt: &Attempt) -> String {
    let mut text = format!("{number}. {}", attempt.endpoint);
    if !attempt.pod.is_empty() {
        text += &format!(" of {}", attempt.pod);
    }
    text += match &attempt.identity {
        Some(_) => ", mutual TLS",
        None => ", no mutual TLS",
    };
    text += &format!(", began after {:.3} ms", attempt.began_ms);
    match &attempt.failure {
        Some(Failure { code, message }) => text + &format!("; failed: {code}: {message}"),
        None => text,
    }
}

/// The caller, or the destination.
pub(crate) fn peer(exchange: &Exchange) -> String {
    let course = exchange.course.as_ref();
    match (exchange.direction, &exchange.identity) {
        (Direction::Inbound, Some(identity)) => identity.clone(),
        (Direction::Inbound, None) => exchange.peer.to_string(),
        (Direction::Outbound, _) => {
            course.map_or_else(String::new, |course| course.service.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn record(pod: &str, direction: &str, more: Value) -> Record {
        let mut exchange = json!({
            "time": "2026-11-27T17:00:01.123Z", "direction": direction,
            "peer": "10.244.1.7:40000", "destination": "10.96.0.7:80", "protocol": "http1",
            "duration_ms": 3.5, "id": "10.244.1.7-5f3a9c210b44",
            "request": {"start_line": "GET /cart", "headers": [], "body_bytes": 0},
            "service": "shop/cart", "attempts": [],
        });
        let members = more.as_object().expect("an object").clone();
        exchange.as_object_mut().expect("an object").extend(members);
        Record {
            pod: pod.into(),
            exchange: serde_json::from_value(exchange).expect("an exchange"),
        }
    }

    fn response(status: u16) -> Value {
        json!({"start_line": format!("HTTP/1.1 {status}"), "headers": [], "body_bytes": 3})
    }

    #[test]
    fn page_names_the_cause_where_it_arose() {
        let attempts = json!([
            {"endpoint": "10.244.2.3:80", "pod": "shop/cart-a", "identity": "spiffe://a", "began_ms": 0.1,
             "failure": {"code": "connect-failed", "message": "cannot connect"}},
            {"endpoint": "10.244.2.4:80", "pod": "shop/cart-b", "identity": "spiffe://a", "began_ms": 1.25},
        ]);
        let caller = json!({"attempts": attempts, "response": response(403), "responded_ms": 2.0});
        let denied = json!({
            "failure": {"code": "denied", "message": "denied by AuthorizationPolicy shop/only-web"},
            "identity": "spiffe://cluster.local/ns/shop/sa/batch",
        });
        let story = Story {
            caller: Some(record("shop/web-1", "outbound", caller)),
            callee: Some(record("shop/cart-b", "inbound", denied)),
            missing: Vec::new(),
        };
        let page = story.page();
        for line in [
            "GET /cart: 403 after 3.500 ms, at 2026-11-27T17:00:01.123Z",
            "Exchange 10.244.1.7-5f3a9c210b44",
            "Why: the proxy of the callee answered denied: denied by AuthorizationPolicy shop/only-web",
            "Proxy of the caller, shop/web-1",
            "  attempt      1. 10.244.2.3:80 of shop/cart-a, mutual TLS, began after 0.100 ms; failed: connect-failed: cannot connect",
            "  attempt      2. 10.244.2.4:80 of shop/cart-b, mutual TLS, began after 1.250 ms",
            "  response     403 after 2.000 ms, complete after 3.500 ms",
            "Proxy of the callee, shop/cart-b",
            "  client       10.244.1.7:40000 (spiffe://cluster.local/ns/shop/sa/batch, verified by mutual TLS)",
        ] {
            assert!(page.lines().any(|other| other == line), "{line}\n{page}");
        }
        assert!(
            page.contains("\n  Meaning: ") && page.contains("\n  Check:   "),
            "{page}"
        );
        assert!(story.is_failure());
    }

    fn cause(direction: &str, more: Value) -> String {
        let one = record("shop/web-1", direction, more);
        let (caller, callee) = match direction {
            "outbound" => (Some(one), None),
            _ => (None, Some(one)),
        };
        let missing = Vec::new();
        let page = Story {
            caller,
            callee,
            missing,
        }
        .page();
        let cause = page.split_once("\nWhy: ").expect("a cause").1;
        cause.split_once("\n\n").expect("records").0.to_owned()
    }

    #[test]
    fn failure_that_was_no_response_is_told_apart() {
        let failure = json!({"code": "upstream-closed", "message": "reset"});
        let ended = |response| json!({"failure": failure, "response": response, "cut_off": true});
        let begun = cause("inbound", ended(response(200)));
        let start = "the proxy of the callee cut off the response, 200: upstream-closed: reset\n";
        assert!(begun.starts_with(start), "{begun}");
        let opaque = cause("outbound", ended(Value::Null));
        let start = "the proxy of the caller closed the connection: upstream-closed: reset\n";
        assert!(opaque.starts_with(start), "{opaque}");
    }

    #[test]
    fn code_of_the_callees_proxy_is_told_without_its_record() {
        let mut limited = response(429);
        limited["headers"] = json!([["x-mesh-error", "rate-limited"]]);
        let cause = cause("outbound", json!({"response": limited}));
        let start = "the proxy of the callee answered rate-limited\n  Meaning: ";
        assert!(cause.starts_with(start), "{cause}");
        assert!(
            cause.ends_with("`spec.rateLimits` of the TrafficPolicy"),
            "{cause}"
        );
    }

    #[test]
    fn failure_that_a_retry_hid_is_the_cause() {
        let failed = json!({"code": "retried-status", "message": "responded with 500"});
        let attempts = json!([
            {"endpoint": "10.244.2.3:80", "pod": "shop/cart-a", "began_ms": 0.1, "failure": failed},
            {"endpoint": "10.244.2.4:80", "pod": "shop/cart-b", "began_ms": 1.25},
        ]);
        let cause = cause(
            "outbound",
            json!({"response": response(200), "attempts": attempts}),
        );
        let expected = "it did not fail: 200, by a retry after attempt 1. 10.244.2.3:80 of shop/cart-a, \
                        no mutual TLS, began after 0.100 ms; failed: retried-status: responded with 500";
        assert_eq!(cause, expected);
    }

    #[test]
    fn cause_is_the_application_if_no_proxy_failed() {
        let story = |status, callee: bool| {
            let one = |direction| record("a/b", direction, json!({"response": response(status)}));
            Story {
                caller: Some(one("outbound")),
                callee: callee.then(|| one("inbound")),
                missing: vec!["The proxy of the callee was not asked.".into()],
            }
        };
        let mut cut_off = story(200, true);
        let callee = cut_off.callee.as_mut().expect("it is known");
        callee.exchange.incomplete = Some("there was no complete response".into());
        assert!(cut_off.is_failure());
        for (story, expected) in [
            (cut_off, "Why: the response, 200, did not arrive completely"),
            (
                story(500, true),
                "Why: the application answered 500, and the mesh passed it on",
            ),
            (
                story(500, false),
                "Why: the upstream answered 500, and the proxy passed it on",
            ),
            (story(200, true), "Why: it did not fail: 200"),
        ] {
            let page = story.page();
            assert!(
                page.lines().any(|line| line == expected),
                "{expected}\n{page}"
            );
            assert!(page.ends_with("\nThe proxy of the callee was not asked.\n"));
        }
        assert_eq!(Story::default().page(), "");
    }
}

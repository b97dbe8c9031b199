//! Bounds of the entries, their identifiers, and what a query finds.

use super::*;
use crate::context::worker::{Worker, WorkerContext};
use crate::inbound::policy::Caller;
use crate::secure::tls::tests::on_worker;
use crate::upstream::balance::Backend;

const PEER: &str = "10.244.1.7:40000";

fn flow(direction: Direction) -> Flow {
    let worker = Worker::new(WorkerContext::for_a_test(""));
    let original = "10.96.0.7:80".parse().unwrap();
    Flow {
        called_by: Default::default(),
        counted: Default::default(),
        slot: worker.slot(),
        worker,
        direction,
        peer: PEER.parse().unwrap(),
        original,
        destination: Backend::alone(original),
        caller: Caller::App,
    }
}

fn entry(flow: &Flow, failure: Option<&Failure>) -> Entry {
    Entry {
        is_failure: failure.is_some(),
        failure: failure.map(Cause::from),
        ..Entry::new(flow, flow.new_exchange(), [Instant::now(); 2])
    }
}

fn all(recent: &Recent) -> Vec<Exchange> {
    recent.query(Query::After(0)).exchanges
}

#[test]
fn others_do_not_displace_failures() {
    on_worker(async {
        let (flow, recent) = (flow(Direction::Outbound), Recent::default());
        let failed = entry(&flow, Some(&Failure::RequestTimeout));
        let id = failed.id;
        recent.add(failed);
        for _ in 0..1000 {
            recent.add(entry(&flow, None));
        }
        assert_eq!(all(&recent).len(), 1 + MAX_ENTRIES);
        let found = recent.query(Query::Id(id));
        assert_eq!((found.ended, found.exchanges.len()), (1001, 1));
        assert_eq!(
            found.exchanges[0].failure.as_ref().unwrap().code,
            "request-timeout"
        );
        // And failures no others.
        for _ in 0..1000 {
            recent.add(entry(&flow, Some(&Failure::RequestTimeout)));
        }
        assert_eq!(all(&recent).len(), 2 * MAX_ENTRIES);
        assert!(recent.query(Query::Id(id)).exchanges.is_empty());
        let latest = recent.query(Query::After(1999));
        assert_eq!((latest.ended, latest.exchanges.len()), (2001, 2));
    });
}

#[test]
fn entries_are_bounded() {
    on_worker(async {
        let flow = flow(Direction::Outbound);
        let long = Failure::Unresolved {
            name: "é".repeat(10_000).into(),
            reason: String::new(),
        };
        let attempt = Attempt {
            endpoint: Arc::new(EndpointInfo::bare(flow.original)),
            began: Instant::now(),
        };
        let mut entry = entry(&flow, Some(&long));
        for _ in 0..100 {
            Entry::fail_attempt(&mut entry.failed, attempt.clone(), &long);
        }
        let path = format!("/{}?secret", "a".repeat(10_000));
        entry.line = Entry::line(&crate::http::view::testing::request("GET", &path));
        let texts = entry.failed.iter().map(|(_, cause)| cause.message.len());
        let size = size_of::<Entry>() + entry.line.len() + texts.sum::<usize>() + MAX_TEXT;
        assert!(size <= 2048, "{size}");
        let json = serde_json::to_string(&entry.exchange()).unwrap();
        assert!(!json.contains("secret") && json.len() < 4096, "{json}");
    });
}

#[test]
fn identifier_is_that_of_the_callers_pod() {
    on_worker(async {
        let flow = flow(Direction::Outbound);
        let (one, other) = (flow.new_exchange(), flow.new_exchange());
        assert_eq!(one.pod.to_string(), "10.244.1.7");
        assert_ne!(one, other);
    });
}

#[test]
fn query_is_one_identifier_or_a_number() {
    let id = ExchangeId::new("10.244.1.7".parse().unwrap(), 42);
    assert_eq!(Query::parse(&format!("id={id}")), Ok(Query::Id(id)));
    assert_eq!(Query::parse("after=7"), Ok(Query::After(7)));
    assert_eq!(Query::parse(""), Ok(Query::After(0)));
    for text in ["id=", "id=1", "after=", "after=-1", "other=1", "after"] {
        assert!(Query::parse(text).is_err(), "{text}");
    }
}

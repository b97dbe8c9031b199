//! The number of entries, identifiers, and what a query finds.

use diy_mesh_model::exchange::{Direction, Exchange};
use diy_mesh_model::identity::Identity;

use super::*;
use crate::context::flow::Flow;
use crate::context::worker::{Worker, WorkerContext};
use crate::error::Failure;
use crate::inbound::policy::Caller;
use crate::observe::ended::{Cause, testing::ended};
use crate::upstream::balance::Backend;
use diy_mesh_testkit::wait::on_worker;

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

fn entry(failure: Option<&Failure>) -> Arc<Ended> {
    Arc::new(Ended {
        is_failure: failure.is_some(),
        failure: failure.map(Cause::from),
        ..ended(Direction::Outbound)
    })
}

fn all(recent: &Recent) -> Vec<Exchange> {
    recent.query(Query::After(0)).exchanges
}

#[test]
fn others_do_not_displace_failures() {
    let recent = Recent::default();
    let failed = entry(Some(&Failure::RequestTimeout));
    let id = failed.id;
    recent.add(failed);
    for _ in 0..1000 {
        recent.add(entry(None));
    }
    assert_eq!(all(&recent).len(), 1 + MAX_ENTRIES);
    let found = recent.query(Query::Id(id));
    assert_eq!((found.ended, found.exchanges.len()), (1001, 1));
    let failure = found.exchanges[0].failure.as_ref();
    assert_eq!(failure.unwrap().code, "request-timeout");
    // And failures no others.
    for _ in 0..1000 {
        recent.add(entry(Some(&Failure::RequestTimeout)));
    }
    assert_eq!(all(&recent).len(), 2 * MAX_ENTRIES);
    assert!(recent.query(Query::Id(id)).exchanges.is_empty());
    let latest = recent.query(Query::After(1999));
    assert_eq!((latest.ended, latest.exchanges.len()), (2001, 2));
}

#[test]
fn denied_namespace_does_not_displace_failures_of_others() {
    let recent = Recent::default();
    let denied = |namespace: &str| {
        let identity = format!("spiffe://cluster.local/ns/{namespace}/sa/a");
        let caller: Identity = identity.parse().unwrap();
        let ended = Arc::new(Ended {
            is_failure: true,
            caller: Some(caller.into()),
            ..ended(Direction::Inbound)
        });
        recent.add(ended.clone());
        ended.id
    };
    let (own, other) = (entry(Some(&Failure::RequestTimeout)), denied("shop"));
    let own_id = own.id;
    recent.add(own);
    let first = denied("bank");
    for _ in 0..1000 {
        denied("bank");
        denied("attic");
    }
    let is_known = |id| !recent.query(Query::Id(id)).exchanges.is_empty();
    assert_eq!([own_id, other, first].map(is_known), [true, true, false]);
    assert_eq!(all(&recent).len(), MAX_ENTRIES);
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

//! The admin server of the controller: `/live`, `/ready` and `/metrics`, and `/identity` for `mesh
//! identity`. No secrets.

use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use diy_mesh_runtime::{Admin, Page, Readiness};

use crate::authority::{AuthorityHandle, status};
use crate::catalog::freshness::Freshness;
use crate::hub::Hub;
use crate::metrics::Metrics;
use crate::proxies::Proxies;

/// Anyone can read the page, which is large in a large cluster. All readers share one of this age.
const PAGE_AGE: Duration = Duration::from_secs(1);

/// Adds the conditions of readiness: a synced and current catalog, and a CA.
pub fn add_conditions(
    readiness: &Readiness,
    hub: Hub,
    freshness: &Freshness,
    authority: AuthorityHandle,
) {
    readiness.check("certificate authority", move || authority.unavailable());
    readiness.check("catalog", move || {
        let missing: Vec<&str> = hub.missing().iter().map(|kind| kind.name()).collect();
        (!missing.is_empty()).then(|| format!("not synced: waiting for {}", missing.join(", ")))
    });
    let freshness = freshness.clone();
    readiness.check("catalog updates", move || freshness.stale());
}

/// The routes of the admin port.
pub fn server(
    readiness: Readiness,
    metrics: Arc<Metrics>,
    authority: AuthorityHandle,
    proxies: Proxies,
    trust_domain: Arc<str>,
) -> Admin {
    let report = move || {
        let (status, trust) = (authority.status(), authority.trust());
        let status = status::report(status, &trust_domain, trust.as_deref(), &proxies.snapshot());
        serde_json::to_vec(&status).expect("numbers and strings are valid JSON")
    };
    let latest = Mutex::new((Bytes::new(), None::<Instant>));
    let identity = move || {
        let mut latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.1.is_none_or(|made| made.elapsed() >= PAGE_AGE) {
            *latest = (report().into(), Some(Instant::now()));
        }
        ready(Page::json(latest.0.clone()))
    };
    Admin::new(readiness, move || metrics.render()).route("/identity", identity)
}

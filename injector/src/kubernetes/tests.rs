//! Reconciliation against a fake API server, and its pure functions.

use super::*;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use diy_mesh_issuer::Certificate;

use http::{Method, Request, Response, header};
use http_body_util::BodyExt;
use kube::client::Body;

/// An API server with one Secret and one webhook configuration.
#[derive(Default)]
struct FakeApi {
    minor_version: &'static str,
    secret: Option<Secret>,
    ca_bundle: Option<ByteString>,
    /// The Secret of another replica, which precedes the next write.
    conflict: Option<Secret>,
    /// The time of the API server.
    date: Option<SystemTime>,
}

impl FakeApi {
    fn respond(&mut self, method: &Method, path: &str, body: &[u8]) -> (u16, String) {
        let text = |object: &Secret| serde_json::to_string(object).expect("JSON");
        if path == "/version" {
            let mut version = serde_json::Map::new();
            for field in ["gitCommit", "gitTreeState", "buildDate", "goVersion"] {
                version.insert(field.into(), "".into());
            }
            for (field, value) in [
                ("major", "1"),
                ("minor", self.minor_version),
                ("gitVersion", "v1.x"),
                ("compiler", ""),
                ("platform", ""),
            ] {
                version.insert(field.into(), value.into());
            }
            return (200, json!(version).to_string());
        }
        if path.contains("/mutatingwebhookconfigurations/") {
            if method == Method::PATCH {
                let patch: serde_json::Value = serde_json::from_slice(body).expect("JSON");
                let ca_bundle = &patch["webhooks"][0]["clientConfig"]["caBundle"];
                self.ca_bundle = Some(serde_json::from_value(ca_bundle.clone()).expect("base64"));
            }
            let bundle = self.ca_bundle.as_ref().map(|bundle| bundle.0.as_slice());
            let bundle = bundle.map(|bundle| std::str::from_utf8(bundle).expect("PEM"));
            let configuration = configuration(&[("a", bundle)]);
            return (200, serde_json::to_string(&configuration).expect("JSON"));
        }
        if method != Method::GET {
            if let Some(other) = self.conflict.take() {
                self.secret = Some(other);
                return status(409, "Conflict");
            }
            self.secret = Some(serde_json::from_slice(body).expect("a Secret"));
        }
        self.secret
            .as_ref()
            .map_or_else(|| status(404, "NotFound"), |secret| (200, text(secret)))
    }
}

fn status(code: u16, reason: &str) -> (u16, String) {
    let status = json!({"status": "Failure", "code": code, "message": "", "reason": reason});
    (code, status.to_string())
}

fn names() -> Names {
    Names::new(["injector".into()])
}

fn material() -> KeyMaterial {
    KeyMaterial::generate(&names(), SystemTime::now()).expect("generates certificates")
}

/// Reconciles once. Returns the result and the publisher.
async fn reconcile(api: &Arc<Mutex<FakeApi>>) -> (Result<(), Error>, Publisher) {
    let service = tower::service_fn({
        let api = api.clone();
        move |request: Request<Body>| {
            let api = api.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await?.to_bytes();
                let mut api = api.lock().expect("not poisoned");
                let (status, text) = api.respond(&head.method, head.uri.path(), &body);
                let response = Response::builder().status(status);
                let response = match api.date {
                    Some(date) => response.header(header::DATE, httpdate::fmt_http_date(date)),
                    None => response,
                };
                Ok::<_, kube::Error>(response.body(Body::from(text.into_bytes())).expect("valid"))
            }
        }
    });
    let client = Client::new(service, "mesh");
    let publisher = Publisher::new(Arc::default(), Arc::default());
    let names = names();
    let mut reconciler = Reconciler {
        secrets: Api::namespaced(client.clone(), "mesh"),
        configurations: Api::all(client.clone()),
        client,
        configuration_name: "injector",
        publisher: &publisher,
        names: &names,
        current: None,
    };
    let result = timeout(RESYNC_INTERVAL, reconciler.reconcile_with_retries())
        .await
        .expect("completes");
    (result, publisher)
}

fn bundle(material: &KeyMaterial) -> Option<ByteString> {
    Some(ByteString(material.bundle().into_bytes()))
}

#[tokio::test(start_paused = true)]
async fn creates_secret_and_writes_ca_bundle() {
    let api = Arc::new(Mutex::new(FakeApi {
        minor_version: "34",
        ..FakeApi::default()
    }));
    let (result, publisher) = reconcile(&api).await;
    result.expect("reconciled");
    let api = api.lock().expect("not poisoned");
    let data = api.secret.as_ref().and_then(|secret| secret.data.as_ref());
    assert_eq!(api.ca_bundle.as_ref(), data.map(|data| &data["ca.crt"]));
    assert!(publisher.subscribe().borrow().is_some());
}

#[tokio::test(start_paused = true)]
async fn adopts_secret_of_another_replica_after_a_conflict() {
    let other = material();
    let api = Arc::new(Mutex::new(FakeApi {
        minor_version: "34",
        conflict: Some(secret_with(new_secret(), &other)),
        ..FakeApi::default()
    }));
    let (result, publisher) = reconcile(&api).await;
    result.expect("reconciled");
    assert_eq!(api.lock().expect("not poisoned").ca_bundle, bundle(&other));
    let serving = publisher.subscribe().borrow().clone();
    let expected = other.serving().expect("valid");
    assert_eq!(serving.expect("published").cert, expected.cert);
}

#[tokio::test(start_paused = true)]
async fn rejects_api_server_without_native_sidecars() {
    let api = Arc::new(Mutex::new(FakeApi {
        minor_version: "28",
        ..FakeApi::default()
    }));
    let (result, _) = reconcile(&api).await;
    assert!(matches!(result, Err(Error::UnsupportedVersion(_))));
    assert!(api.lock().expect("not poisoned").secret.is_none());
}

#[tokio::test(start_paused = true)]
async fn certificates_are_judged_by_the_date_of_the_api_server_alone() {
    let (own, day) = (SystemTime::now(), Duration::from_secs(24 * 3600));
    for date in [own - day * 400, own - day, own, own + day, own + day * 400] {
        // Another replica, whose clock is ahead of the API server, has generated the certificates.
        let other = KeyMaterial::generate(&names(), date + day).expect("generates certificates");
        let api = Arc::new(Mutex::new(FakeApi {
            minor_version: "34",
            secret: Some(secret_with(new_secret(), &other)),
            date: Some(date),
            ..FakeApi::default()
        }));
        let (result, publisher) = reconcile(&api).await;
        result.expect("reconciled");
        assert_eq!(publisher.health.unmet(), None);
        let stored = api.lock().expect("not poisoned").secret.clone();
        let data = stored.and_then(|secret| secret.data).expect("data");
        let stored = KeyMaterial::from_fields(|name| Some(data.get(name)?.0.as_slice()));
        let stored = stored.expect("valid");
        assert!(stored.serving_not_after() > date && stored.serving_not_after() < date + day * 91);
        assert_eq!(stored.renewed(&names(), date).expect("renews"), None);
    }
}

#[tokio::test(start_paused = true)]
async fn api_server_trusts_the_webhook_over_a_whole_rotation_whatever_the_own_clock_is() {
    let (own, day) = (SystemTime::now(), Duration::from_secs(24 * 3600));
    for begin in [
        own - day * 400,
        own - day * 30,
        own + day * 30,
        own + day * 400,
    ] {
        let api = Arc::new(Mutex::new(FakeApi {
            minor_version: "34",
            date: Some(begin),
            ..FakeApi::default()
        }));
        let (mut bundles, mut certificates) = (BTreeSet::new(), BTreeSet::new());
        for days in 0..400 {
            let now = begin + day * days;
            // The CA is replaced in two steps.
            for date in [now, now + day / 20] {
                api.lock().expect("not poisoned").date = Some(date);
                let (result, publisher) = reconcile(&api).await;
                result.expect("reconciled");
                assert_eq!(publisher.health.unmet(), None);
                let serving = publisher.subscribe().borrow().clone().expect("published");
                let bundle = api.lock().expect("not poisoned").ca_bundle.clone();
                let bundle = bundle.expect("a caBundle").0;
                let [serving] = &serving.cert[..] else {
                    panic!("expected one certificate");
                };
                let all = |pem: &[u8]| Certificate::all(pem).expect("certificates");
                let leaf = all(diy_mesh_issuer::pem(serving).as_bytes()).swap_remove(0);
                assert!(leaf.not_before <= date && date < leaf.not_after);
                let is_trusted = |ca: &Certificate| {
                    leaf.is_signed_by(ca) && ca.not_before <= date && date < ca.not_after
                };
                assert!(all(&bundle).iter().any(is_trusted), "{date:?}");
                bundles.insert(bundle);
                certificates.insert(serving.to_vec());
            }
        }
        // Each CA is valid for a year. A bundle has it alone, with the next one, or with the former
        // one until that expires.
        assert!((3..=5).contains(&bundles.len()), "{}", bundles.len());
        assert!(
            (6..=9).contains(&certificates.len()),
            "{}",
            certificates.len()
        );
    }
}

fn configuration(bundles: &[(&str, Option<&str>)]) -> MutatingWebhookConfiguration {
    let webhooks: Vec<_> = bundles
        .iter()
        .map(|(name, bundle)| {
            let bundle = bundle.map(|bundle| ByteString(bundle.as_bytes().to_vec()));
            json!({"name": name, "clientConfig": {"caBundle": bundle}, "admissionReviewVersions": ["v1"], "sideEffects": "None"})
        })
        .collect();
    serde_json::from_value(json!({"metadata": {"resourceVersion": "7"}, "webhooks": webhooks}))
        .expect("a configuration")
}

#[test]
fn keeps_matching_ca_bundle() {
    assert_eq!(
        ca_bundle_patch(
            &configuration(&[("a", Some("CA")), ("b", Some("CA"))]),
            "CA"
        ),
        None
    );
    assert_eq!(ca_bundle_patch(&configuration(&[]), "CA"), None);
}

#[test]
fn patches_only_outdated_ca_bundles() {
    let patch = ca_bundle_patch(
        &configuration(&[("a", Some("CA")), ("b", Some("old")), ("c", None)]),
        "CA",
    );
    let expected = json!({
        "metadata": {"resourceVersion": "7"},
        "webhooks": [
            {"name": "b", "clientConfig": {"caBundle": "Q0E="}},
            {"name": "c", "clientConfig": {"caBundle": "Q0E="}},
        ],
    });
    assert_eq!(patch, Some(expected));
}

#[test]
fn secret_keeps_foreign_fields_and_drops_outdated_ones() {
    let material = material();
    let fields = ["next-ca.crt", "tls.crt", "foreign"];
    let data = fields
        .into_iter()
        .map(|name| (name.into(), ByteString(b"x".to_vec())))
        .collect();
    let stored = Secret {
        data: Some(data),
        ..Secret::default()
    };
    let data = secret_with(stored, &material).data.expect("data");
    assert_eq!(
        data.keys().map(String::as_str).collect::<Vec<_>>(),
        ["ca.crt", "ca.key", "foreign", "tls.crt", "tls.key"]
    );
    assert_ne!(data["tls.crt"].0, b"x");
}

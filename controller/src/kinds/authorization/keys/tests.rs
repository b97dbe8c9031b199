//! Keys in the status of policies.

use tokio::time::Instant;

use super::*;
use crate::index::authorization::KeySources;
use crate::object::Key;
use crate::object::issuer_keys::MAX_MESSAGE;
use crate::publish::keys::schedule::Schedule;

fn url() -> Source {
    Source::Url("https://id.example.com/keys".to_owned())
}

fn secret(namespace: &str) -> Source {
    Source::Secret(Key::new(namespace, "idp"), "jwks".to_owned())
}

/// A replica that has begun to fetch keys.
fn begun() -> Schedule {
    let mut sources = KeySources::default();
    for source in [url(), secret("shop"), secret("bank")] {
        sources.add(&Key::new("shop", "p"), source);
    }
    let mut schedule = Schedule::default();
    let (due, refused) = schedule.begin(&sources, Instant::now());
    assert_eq!((due.len(), refused.len()), (3, 0));
    schedule
}

/// Entries with the results of attempts.
fn desired(results: &Schedule, sources: &[Source]) -> Vec<(Source, Entry)> {
    let entry = |source: &Source| (source.clone(), Entry::default());
    let mut desired: Vec<_> = sources.iter().map(entry).collect();
    results.add_to(&mut desired);
    desired
}

#[test]
fn status_keeps_good_keys_over_failures_and_restarts() {
    let sources = [url(), secret("shop")];
    let (mut results, now) = (begun(), Instant::now());
    // Nothing was tried yet: each source has an entry.
    let status = merge(&desired(&results, &sources), &json!({})).unwrap();
    let names = json!([{"source": "https://id.example.com/keys"}, {"source": "Secret idp/jwks"}]);
    assert_eq!(status, names);
    let mut status = json!({"issuers": status, "ancestors": []});
    assert_eq!(merge(&desired(&results, &sources), &status), None);
    assert!(results.end(&url(), Ok("first".to_owned()), now));
    assert!(!results.end(&url(), Ok("first".to_owned()), now));
    status["issuers"] = merge(&desired(&results, &sources), &status).unwrap();
    assert_eq!(
        entries(&status.to_string())[0].keys.as_deref(),
        Some("first")
    );
    // A replica that has fetched nothing changes nothing.
    let mut restarted = begun();
    assert_eq!(merge(&desired(&restarted, &sources), &status), None);
    assert!(restarted.end(&url(), Err("down".to_owned()), now));
    status["issuers"] = merge(&desired(&restarted, &sources), &status).unwrap();
    let entry = &entries(&status.to_string())[0];
    assert_eq!(
        (entry.keys.as_deref(), entry.message.as_deref()),
        (Some("first"), Some("down"))
    );
    assert!(restarted.end(&url(), Ok("second".to_owned()), now));
    status["issuers"] = merge(&desired(&restarted, &sources), &status).unwrap();
    let entry = &entries(&status.to_string())[0];
    assert_eq!(
        (entry.keys.as_deref(), entry.message.as_deref()),
        (Some("second"), None)
    );
    // A source that the policy no longer has.
    status["issuers"] = merge(&desired(&restarted, &[]), &status).unwrap();
    assert_eq!(status["issuers"], json!([]));
}

#[test]
fn secrets_of_other_namespaces_are_other_sources() {
    let (mut results, now) = (begun(), Instant::now());
    results.end(&secret("bank"), Ok("theirs".to_owned()), now);
    let desired = desired(&results, &[secret("shop")]);
    assert_eq!(desired[0].1, Entry::default());
}

#[test]
fn condition_tells_which_keys_are_missing_or_stale() {
    let fetched = |has_keys, message: &str| Fetched {
        issuer: "https://id.example.com".to_owned(),
        source: url(),
        has_keys,
        message: Some(message.to_owned()).filter(|message| !message.is_empty()),
    };
    assert_eq!(condition(&[]), None);
    for (fetched, holds, part) in [
        (fetched(true, ""), true, "are known"),
        (
            fetched(true, "down"),
            true,
            "the latest known keys are in use; https://id",
        ),
        (fetched(false, ""), false, "keys: they were not fetched yet"),
        (
            fetched(false, "down"),
            false,
            "https://id.example.com/keys: down",
        ),
    ] {
        let condition = condition(&[fetched]).unwrap();
        assert_eq!(condition.holds, holds);
        assert!(condition.message.contains(part), "{}", condition.message);
    }
}

#[test]
fn messages_have_the_length_that_the_api_server_accepts() {
    let (mut results, now) = (begun(), Instant::now());
    results.end(&url(), Err("ä".repeat(5000)), now);
    let merged = merge(&desired(&results, &[url()]), &json!({})).unwrap();
    assert_eq!(
        merged[0]["message"].as_str().unwrap().chars().count(),
        MAX_MESSAGE
    );
}

//! The condition of AuthorizationPolicies: the proxies that enforce them.

use super::*;
use crate::authorization::tests::policy as authorization;

/// A policy for all pods of `shop`.
fn of_shop(name: &str, rules: Value) -> Object {
    let target = json!({"kind": "Pod", "selector": {}});
    let spec = json!({"targetRefs": [target], "action": "ALLOW", "rules": rules});
    Object::Authorization(authorization("shop", name, &spec))
}

/// The stream of a pod with its own state.
fn with_state(hub: &Hub, name: &str, lacking: Lacking) -> Resources {
    let key = Key::new("shop", name);
    let mut stream = stream(hub, &key, CURRENT, &[]);
    stream.set_lacking(lacking);
    stream.subscribe(&Resource::Workload(key, "".into()));
    stream
}

#[tokio::test(start_paused = true)]
async fn policy_names_the_proxies_that_do_not_enforce_it() {
    let hub = catalog();
    apply(&hub, [of_shop("p", json!([{}]))]);
    let current = with_state(&hub, "replica", Lacking::default());
    let lacking = Lacking {
        policies: false,
        authorization: true,
    };
    let old = with_state(&hub, "client", lacking);
    for stream in [&current, &old] {
        answer(stream, None);
    }
    review(&hub).await;
    let message = "1 of 2 pods connected to the writing replica have generation 1; not: client \
                   (the proxy is of an older release: restart the pod)";
    let policy = || "AuthorizationPolicy shop/p at *".to_owned();
    assert_eq!(conditions(&hub), [(policy(), message.to_owned())]);
    drop(old);
    let again = with_state(&hub, "client", Lacking::default());
    answer(&again, None);
    review(&hub).await;
    let all = all_conditions(&hub);
    assert_eq!(all.len(), 1);
    assert!(
        all[0].1.holds && all[0].1.message.starts_with("2 of 2 pods"),
        "{all:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn policy_over_the_bound_of_a_pod_says_so() {
    let hub = catalog();
    let header = json!({"name": "h", "type": "Exact", "value": "v".repeat(1000)});
    let rule = json!({"requests": [{"headers": vec![header; 16]}]});
    let large = |name| of_shop(name, json!(vec![rule.clone(); 12]));
    apply(&hub, [large("p1"), large("p2")]);
    let replica = with_state(&hub, "replica", Lacking::default());
    answer(&replica, None);
    review(&hub).await;
    let mut failed = all_conditions(&hub);
    failed.retain(|(_, one)| !one.holds);
    assert_eq!(failed.len(), 1);
    let (object, condition) = &failed[0];
    assert_eq!(
        (&**object, condition.reason),
        ("AuthorizationPolicy shop/p2 at *", "TooLarge")
    );
    assert!(
        condition
            .message
            .contains("denies the calls of its targets")
    );
}

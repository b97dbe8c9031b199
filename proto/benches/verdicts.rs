//! How long a verdict takes, in nanoseconds, and how often it allocates: `cargo bench -p
//! diy-mesh-proto`. The goals are 2 µs without an allocation for 1,000 rules of which 10 concern the
//! caller and the port, and 50 µs for 1,000 templates on one port.

use std::alloc::System;
use std::hint::black_box;
use std::time::{Duration, Instant};

use diy_mesh_model::identity::Identity;
use diy_mesh_proto::authorization::{Authorization, Call, REVISION, Request};
use diy_mesh_proto::mesh::v1::authorization_policy::Action;
use diy_mesh_proto::mesh::v1::authorization_source::Kind;
use diy_mesh_proto::mesh::v1::authorized_path;
use diy_mesh_proto::mesh::v1::{
    self as proto, AuthorizationPolicy, AuthorizationRule, AuthorizationSource,
    AuthorizationSources, AuthorizedPath, IdentityMatch, RequestMatch,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const RULES: usize = 1000;
const WARM_UP: Duration = Duration::from_millis(100);
const MEASUREMENT: Duration = Duration::from_millis(500);

struct Head(&'static str);

impl Request for Head {
    fn method(&self) -> &[u8] {
        b"GET"
    }

    fn path(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn hosts(&self, each: &mut dyn FnMut(&[u8])) {
        each(b"web.shop");
    }

    fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        each(b"user-agent", b"bench");
    }
}

fn rule(namespace: &str, ports: Vec<u32>, template: String) -> AuthorizationRule {
    let identity = IdentityMatch {
        trust_domain: "cluster.local".into(),
        namespace: namespace.into(),
        service_account: String::new(),
    };
    let sources = vec![AuthorizationSource {
        kind: Some(Kind::Identity(identity)),
    }];
    let path = AuthorizedPath {
        kind: Some(authorized_path::Kind::Template(template)),
    };
    AuthorizationRule {
        revision: REVISION,
        sources: Some(AuthorizationSources { sources }),
        ports,
        requests: vec![RequestMatch {
            methods: vec!["GET".into()],
            paths: vec![path],
            ..RequestMatch::default()
        }],
        ..AuthorizationRule::default()
    }
}

fn compile(action: Action, rules: impl Iterator<Item = AuthorizationRule>) -> Authorization {
    let policies = rules.enumerate().map(|(number, rule)| AuthorizationPolicy {
        name: format!("AuthorizationPolicy shop/{number}"),
        action: action.into(),
        rules: vec![rule],
        ..AuthorizationPolicy::default()
    });
    Authorization::compile(&proto::Authorization {
        policies: policies.collect(),
        ..proto::Authorization::default()
    })
}

/// Prints the mean time of a verdict, and its allocations.
fn measure(name: &str, authorization: &Authorization, path: &'static str) {
    let caller = Identity::new("cluster.local", "shop", "web").expect("a valid identity");
    let head = Head(path);
    let call = Call {
        identity: Some(&caller),
        address: [10, 0, 0, 1].into(),
        port: 80,
        host: None,
        request: Some(&head),
        token: None,
    };
    let run = |duration: Duration| {
        let start = Instant::now();
        let mut verdicts = 0;
        while start.elapsed() < duration {
            for _ in 0..100 {
                let _ = black_box(authorization.judge(black_box(&call)));
            }
            verdicts += 100;
        }
        start.elapsed().as_nanos() / verdicts
    };
    run(WARM_UP);
    let region = Region::new(ALLOCATOR);
    let verdict = authorization.judge(&call);
    let allocations = region.change().allocations;
    let verdict = if verdict.is_ok() { "allowed" } else { "denied" };
    let time = run(MEASUREMENT);
    println!("{name:60} {verdict:8} {time:>8} ns {allocations:>3} allocations");
}

fn main() {
    let of_few = |number: usize| match number % 100 {
        0 => rule("shop", vec![80], format!("/shop/{number}/{{*}}")),
        1..50 => rule("shop", vec![81 + number as u32], "/{**}".into()),
        _ => rule(&format!("other-{number}"), vec![80], "/{**}".into()),
    };
    let on_one_port =
        |number: usize| rule("shop", vec![80], format!("/v1/items/{{*}}/part-{number}"));
    let few = |action| compile(action, (0..RULES).map(of_few));
    let many = |action| compile(action, (0..RULES).map(on_one_port));
    let none = Authorization::default();
    measure("no policies", &none, "/shop/900/x");
    let name = "1,000 rules, 10 concern the call";
    measure(
        &format!("{name}: ALLOW, the last matches"),
        &few(Action::Allow),
        "/shop/900/x",
    );
    measure(
        &format!("{name}: ALLOW, none matches"),
        &few(Action::Allow),
        "/shop/x/x",
    );
    measure(
        &format!("{name}: DENY, none matches"),
        &few(Action::Deny),
        "/shop/x/x",
    );
    let name = "1,000 templates on one port";
    measure(
        &format!("{name}: ALLOW, the last matches"),
        &many(Action::Allow),
        "/v1/items/1/part-999",
    );
    measure(
        &format!("{name}: ALLOW, none matches"),
        &many(Action::Allow),
        "/v1/items/1/part-x",
    );
    measure(
        &format!("{name}: DENY, none matches"),
        &many(Action::Deny),
        "/v1/items/1/part-x",
    );
    let path = "/v1//items/%31/./part-x;a=b";
    measure(
        &format!("{name}: DENY, many readings"),
        &many(Action::Deny),
        path,
    );
}

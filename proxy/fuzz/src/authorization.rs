//! Verdicts. No request passes both a policy that allows what matches, and one that denies it.

use diy_mesh_proto::authorization::{Authorization, Call, REVISION, Request};
use diy_mesh_proto::mesh::v1::authorization_policy::Action;
use diy_mesh_proto::mesh::v1::authorized_path::Kind;
use diy_mesh_proto::mesh::v1::{
    self as proto, AuthorizationPolicy, AuthorizationRule, AuthorizedField, AuthorizedPath,
    RequestMatch, authorized_field,
};

/// Lines: the path, the method, the host, and the value of a field.
struct Head<'a>(Vec<&'a [u8]>);

impl Head<'_> {
    fn line(&self, number: usize) -> &[u8] {
        self.0.get(number).copied().unwrap_or_default()
    }
}

impl Request for Head<'_> {
    fn method(&self) -> &[u8] {
        self.line(1)
    }

    fn path(&self) -> &[u8] {
        self.line(0)
    }

    fn hosts(&self, each: &mut dyn FnMut(&[u8])) {
        each(self.line(2));
    }

    fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        for value in self.0.iter().skip(3) {
            each(b"x-role", value);
        }
    }
}

/// Judges a request.
pub fn authorization(bytes: &[u8]) {
    let head = Head(bytes.split(|byte| *byte == b'\n').collect());
    let path = |kind| RequestMatch {
        paths: vec![AuthorizedPath { kind: Some(kind) }],
        ..RequestMatch::default()
    };
    let role = AuthorizedField {
        name: "x-role".into(),
        kind: Some(authorized_field::Kind::Exact("admin".into())),
    };
    for condition in [
        path(Kind::Exact("/admin".into())),
        path(Kind::Prefix("/admin".into())),
        path(Kind::Suffix(".html".into())),
        path(Kind::Template("/a/{*}/{**}".into())),
        RequestMatch {
            methods: vec!["GET".into()],
            ..RequestMatch::default()
        },
        RequestMatch {
            hosts: vec!["*.example.com".into()],
            ..RequestMatch::default()
        },
        RequestMatch {
            headers: vec![role],
            ..RequestMatch::default()
        },
    ] {
        let [passes_allow, passes_deny] =
            [Action::Allow, Action::Deny].map(|action| judge(action, &condition, &head));
        assert!(!passes_allow || !passes_deny, "passes both: {condition:?}");
    }
}

fn judge(action: Action, condition: &RequestMatch, head: &Head<'_>) -> bool {
    let rule = AuthorizationRule {
        revision: REVISION,
        requests: vec![condition.clone()],
        ..AuthorizationRule::default()
    };
    let policy = AuthorizationPolicy {
        action: action.into(),
        rules: vec![rule],
        ..AuthorizationPolicy::default()
    };
    let authorization = Authorization::compile(&proto::Authorization {
        policies: vec![policy],
        ..proto::Authorization::default()
    });
    let call = Call {
        identity: None,
        address: [10, 0, 0, 1].into(),
        port: 80,
        host: None,
        request: Some(head),
        token: None,
    };
    authorization.judge(&call).is_ok()
}

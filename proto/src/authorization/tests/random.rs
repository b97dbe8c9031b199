//! Random policies and calls, judged by both implementations.

use fastrand::Rng;
use serde_json::json;

use super::naive::{Ask, is_path, judge};
use super::*;

/// Random policies and calls of few names, so that many of them match.
struct Random(Rng);

impl Random {
    fn one<T: Clone>(&mut self, choices: &[T]) -> T {
        self.0.choice(choices).unwrap().clone()
    }

    fn some<T>(&mut self, most: usize, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.0.usize(0..=most)).map(|_| make(self)).collect()
    }

    fn path(&mut self) -> String {
        let pieces = [
            "a", "b", "A", "/", "/", "//", "/.", "/..", "/../", ";", ";x", ".", "%2F", "%2e",
            "%2E", "%3B", "\\", "%5C", "%61", ".html",
        ];
        let rare = [
            "%00", "%", "#", "?", "%ff", "%c3%a9", "\u{e9}", "%0a", "%25",
        ];
        let mut path: String = if self.0.u8(..) < 250 {
            "/".into()
        } else {
            "".into()
        };
        for _ in 0..self.0.usize(0..8) {
            let piece = if self.0.u8(..) < 250 {
                self.one(&pieces)
            } else {
                self.one(&rare)
            };
            path.push_str(piece);
        }
        path
    }

    fn pattern(&mut self) -> AuthorizedPath {
        if self.0.u8(..) < 8 {
            return AuthorizedPath { kind: None };
        }
        path(self.one(&[
            "exact:/",
            "exact:/a",
            "exact:/a/",
            "exact:/a/b",
            "exact:/a%2Fb",
            "exact:/a//b",
            "exact:/a;x",
            "exact:/A",
            "prefix:/",
            "prefix:/a",
            "prefix:/a/",
            "prefix:/b/a",
            "prefix:/a//b",
            "prefix:/a%2Fb",
            "suffix:b",
            "suffix:.html",
            "suffix:/",
            "template:/{*}",
            "template:/{**}",
            "template:/a/{*}",
            "template:/a/{**}",
            "template:/{*}/b",
            "template:/{*}/{*}",
            "template:/{*}/a/{**}",
        ]))
    }

    fn source(&mut self) -> AuthorizationSource {
        match self.0.u8(..16) {
            0 => AuthorizationSource { kind: None },
            1 => unauthenticated(),
            2 | 3 => block(self.one(&["10.0.0.0/8", "fd00::/8", "10.0.0.1", ""])),
            _ => client(self.one(&[
                "shop/", "bank/", "shop/web", "shop/api", "bank/web", "/web", "/",
            ])),
        }
    }

    fn request(&mut self) -> RequestMatch {
        let field = |random: &mut Self| {
            let value = random.one(&[
                "exact:a",
                "exact:b",
                "exact:a,b",
                "exact:a; b",
                "prefix:a",
                "suffix:b",
                "present:",
            ]);
            let mut header = header(random.one(&["x-role", "accept"]), value)
                .headers
                .remove(0);
            header.kind = header.kind.filter(|_| random.0.u8(..) > 8);
            header
        };
        RequestMatch {
            methods: self.some(1, |random| {
                random.one(&["GET", "POST", "CONNECT"]).to_owned()
            }),
            paths: self.some(2, Self::pattern),
            hosts: self.some(1, |random| random.one(&["a.b", "*.b", "b"]).to_owned()),
            headers: self.some(1, field),
            claims: if self.0.u8(..4) == 0 {
                self.some(2, Self::claim)
            } else {
                vec![]
            },
        }
    }

    fn claim(&mut self) -> AuthorizedField {
        let values = [
            "exact:a",
            "exact:b",
            "exact:1",
            "exact:true",
            "prefix:a",
            "suffix:b",
            "present:",
        ];
        let name = self.one(&["sub", "scope", "groups"]);
        let mut claim = header(name, self.one(&values)).headers.remove(0);
        claim.kind = claim.kind.filter(|_| self.0.u8(..) > 8);
        claim
    }

    fn issuer(&mut self) -> TokenIssuer {
        let field = |random: &mut Self| ClaimField {
            claim: "sub".into(),
            name: random.one(&["x-user", "x-role"]).into(),
        };
        TokenIssuer {
            fields: self.some(1, field),
            ..TokenIssuer::default()
        }
    }

    fn token(&mut self) -> Token {
        let value = |random: &mut Self| {
            random.one(&[
                json!(null),
                json!("a"),
                json!("ab"),
                json!("b a"),
                json!(["b", 1]),
                json!([]),
                json!(true),
                json!({"a": "a"}),
            ])
        };
        let names = ["p1", "p2", "p3", "p4"].map(Arc::from);
        Token {
            policies: self.some(4, |random| random.one(&names)),
            claims: Arc::new(
                json!({"sub": value(self), "scope": value(self), "groups": value(self)}),
            ),
        }
    }

    fn ports(&mut self) -> Vec<u32> {
        self.one(&[
            vec![],
            vec![],
            vec![80],
            vec![81],
            vec![80, 81],
            vec![80, 82],
        ])
    }

    fn rule(&mut self) -> AuthorizationRule {
        let sources = self.some(2, Self::source);
        let has_sources = self.0.bool();
        AuthorizationRule {
            revision: if self.0.u8(..) < 8 {
                self.one(&[0, 3])
            } else {
                self.one(&[1, 2])
            },
            sources: has_sources.then_some(AuthorizationSources { sources }),
            not_sources: if self.0.u8(..4) == 0 {
                self.some(2, Self::source)
            } else {
                vec![]
            },
            ports: self.ports(),
            requests: self.some(2, Self::request),
        }
    }

    fn policies(&mut self) -> proto::Authorization {
        let mut count = 0;
        let policies = self.some(4, |random| {
            count += 1;
            AuthorizationPolicy {
                routes: None,
                name: format!("p{count}"),
                action: if random.0.u8(..) < 4 {
                    77
                } else {
                    random.one(&[Action::Allow, Action::Deny]).into()
                },
                audit: random.0.u8(..4) == 0,
                ports: random.ports(),
                rules: random.some(3, Self::rule),
                issuers: if random.0.u8(..4) == 0 {
                    random.some(2, Self::issuer)
                } else {
                    vec![]
                },
                authorizer: None,
            }
        });
        proto::Authorization {
            policies,
            deny_by_default: self.0.u8(..4) == 0,
            default_name: "default".into(),
            plain_paths: false,
        }
    }

    fn head(&mut self) -> Head {
        let bytes = |text: &str| text.as_bytes().to_vec();
        Head {
            method: bytes(self.one(&["GET", "GET", "POST", "get", "CONNECT"])),
            path: self.path().into_bytes(),
            hosts: self.some(2, |random| {
                bytes(random.one(&["a.b", "A.b.:80", "b", "c", "c.a.b", ".b", "b:x", "a.b"]))
            }),
            fields: self.some(3, |random| {
                let name = random.one(&["x-role", "X-Role", "x_role", "accept", "other"]);
                (
                    bytes(name),
                    bytes(random.one(&["a", "b", "a,b", "a, b", "a; b", " a", ""])),
                )
            }),
        }
    }
}

#[test]
fn agrees_with_the_verdict_of_the_naive_implementation() {
    let mut random = Random(Rng::with_seed(24));
    let (mut allowed, mut denied, mut audited) = (0, 0, 0);
    for _ in 0..2_000 {
        let message = random.policies();
        let authorization = Authorization::compile(&message);
        for _ in 0..8 {
            let names = ["shop/web", "shop/api", "bank/web", "", ""];
            let identity = Some(random.one(&names))
                .filter(|name| !name.is_empty())
                .map(identity);
            let head = Some(random.head()).filter(|_| random.0.u8(..4) > 0);
            let token = Some(random.token()).filter(|_| random.0.bool());
            let call = Call {
                token: token.as_ref(),
                identity: identity.as_ref(),
                address: random
                    .one(&["10.0.0.1", "11.0.0.1", "::ffff:10.0.0.1", "fd00::1"])
                    .parse()
                    .unwrap(),
                port: random.one(&[80, 81]),
                host: None,
                request: head.as_ref().map(|head| head as &dyn Request),
            };
            let context = || {
                format!(
                    "{message:?} {:?} {} {} {head:?} {token:?}",
                    call.identity, call.address, call.port
                )
            };
            let rule_of =
                |denial: Denial| denial.rule.map(|rule| (denial.policy.to_string(), rule));
            let verdict = authorization.judge(&call).map_err(rule_of);
            assert_eq!(
                verdict,
                judge(&message, &call, head.as_ref(), false),
                "{}",
                context()
            );
            let audit = authorization.audit(&call).map(rule_of);
            let expected = judge(&message, &call, head.as_ref(), true)
                .err()
                .filter(|_| verdict.is_ok());
            assert_eq!(audit, expected, "{}", context());
            *if verdict.is_ok() {
                &mut allowed
            } else {
                &mut denied
            } += 1;
            audited += usize::from(audit.is_some());
        }
    }
    assert!(
        allowed > 3_000 && denied > 3_000 && audited > 500,
        "{allowed} {denied} {audited}"
    );
}

#[test]
fn agrees_on_single_patterns_and_paths() {
    let mut random = Random(Rng::with_seed(25));
    let (mut matched, mut differ) = (0, 0);
    for _ in 0..10_000 {
        let (pattern, path) = (random.pattern(), random.path());
        let condition = RequestMatch {
            paths: vec![pattern],
            ..RequestMatch::default()
        };
        let head = get(&path);
        let ask = |ask| is_path(&condition.paths, ask, path.as_bytes());
        let (may, must) = (ask(Ask::May), ask(Ask::Must));
        assert_eq!(
            passes(Action::Allow, &condition, &head),
            must,
            "{condition:?} {path}"
        );
        assert_eq!(
            passes(Action::Deny, &condition, &head),
            !may,
            "{condition:?} {path}"
        );
        matched += usize::from(must);
        differ += usize::from(may && !must);
    }
    assert!(matched > 500 && differ > 500, "{matched} {differ}");
}

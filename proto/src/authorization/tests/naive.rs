//! A second implementation of the verdict, as plain as can be: it makes all readings, and asks in
//! two passes whether a rule may match (DENY) and whether it must (ALLOW).

use std::collections::BTreeSet;

use fastrand::Rng;

use super::*;
use crate::mesh::v1::authorization_source::Kind as SourceKind;
use crate::mesh::v1::authorized_field::Kind as FieldKind;

/// What is asked of a rule.
#[derive(Clone, Copy, PartialEq)]
enum Ask {
    May,
    Must,
}

impl Ask {
    /// The answer for all readings of a value.
    fn of(self, readings: &[bool]) -> bool {
        if self == Ask::May {
            readings.contains(&true)
        } else {
            !readings.contains(&false)
        }
    }

    /// The answer for what is not known.
    fn unknown(self) -> bool {
        self.of(&[true, false])
    }

    fn opposite(self) -> Ask {
        if self == Ask::May {
            Ask::Must
        } else {
            Ask::May
        }
    }
}

fn judge(
    message: &proto::Authorization,
    call: &Call<'_>,
    head: Option<&Head>,
    audit: bool,
) -> Result<(), Option<(String, usize)>> {
    let port = u32::from(call.port);
    let is_at = |ports: &[u32]| ports.is_empty() || ports.contains(&port);
    let policies = message
        .policies
        .iter()
        .filter(|policy| audit || !policy.audit);
    let policies: Vec<_> = policies.filter(|policy| is_at(&policy.ports)).collect();
    for policy in &policies {
        if policy.action == 77 {
            return Err(Some((policy.name.clone(), 0)));
        }
        for (index, rule) in policy.rules.iter().enumerate() {
            if policy.action() == Action::Deny && matches(rule, Ask::May, call, head) {
                return Err(Some((policy.name.clone(), index)));
            }
        }
    }
    let mut allow = policies
        .iter()
        .filter(|policy| policy.action() == Action::Allow)
        .peekable();
    let is_allowed = if allow.peek().is_none() {
        !message.deny_by_default
    } else {
        allow.any(|policy| {
            policy
                .rules
                .iter()
                .any(|rule| matches(rule, Ask::Must, call, head))
        })
    };
    if is_allowed { Ok(()) } else { Err(None) }
}

fn matches(rule: &AuthorizationRule, ask: Ask, call: &Call<'_>, head: Option<&Head>) -> bool {
    if rule.revision != 1 {
        return ask.unknown();
    }
    let of_sources = |ask, sources: &[AuthorizationSource]| {
        sources.iter().any(|source| is_source(source, ask, call))
    };
    let requests = match head {
        _ if rule.requests.is_empty() => true,
        None => ask.unknown(),
        Some(head) => rule
            .requests
            .iter()
            .any(|request| is_request(request, ask, head)),
    };
    (rule.ports.is_empty() || rule.ports.contains(&u32::from(call.port)))
        && rule
            .sources
            .as_ref()
            .is_none_or(|list| of_sources(ask, &list.sources))
        && !of_sources(ask.opposite(), &rule.not_sources)
        && requests
}

fn is_source(source: &AuthorizationSource, ask: Ask, call: &Call<'_>) -> bool {
    match (&source.kind, call.identity) {
        (None, _) | (Some(SourceKind::Identity(_)), None) => ask.unknown(),
        (Some(SourceKind::Identity(expected)), Some(identity)) => {
            let text = format!(
                "{}/{}/{}",
                identity.trust_domain(),
                identity.namespace(),
                identity.service_account()
            );
            let parts = [
                &expected.trust_domain,
                &expected.namespace,
                &expected.service_account,
            ];
            parts
                .iter()
                .zip(text.split('/'))
                .all(|(expected, part)| [part, ""].contains(&expected.as_str()))
        }
        (Some(SourceKind::Unauthenticated(_)), identity) => identity.is_none(),
        (Some(SourceKind::IpBlock(block)), _) => match &**block {
            "10.0.0.0/8" => call.address.to_canonical().to_string().starts_with("10."),
            "fd00::/8" => call.address.to_string().starts_with("fd"),
            _ => ask.unknown(),
        },
    }
}

fn is_request(request: &RequestMatch, ask: Ask, head: &Head) -> bool {
    let method = String::from_utf8_lossy(&head.method);
    let methods = [method.to_string(), method.to_uppercase()];
    let methods = methods.map(|method| request.methods.contains(&method));
    (request.methods.is_empty() || ask.of(&methods))
        && (request.paths.is_empty() || is_path(&request.paths, ask, &head.path))
        && (request.hosts.is_empty() || is_host(&request.hosts, ask, &head.hosts))
        && request
            .headers
            .iter()
            .all(|field| is_field(field, ask, &head.fields))
}

fn is_path(patterns: &[AuthorizedPath], ask: Ask, path: &[u8]) -> bool {
    let Some(readings) = readings(path) else {
        return ask.unknown();
    };
    let any = |path: &[u8], is_loose: bool| {
        patterns
            .iter()
            .any(|pattern| is_pattern(pattern, path, is_loose))
    };
    let strict: Vec<bool> = readings.iter().map(|path| any(path, false)).collect();
    let is_loose = readings.iter().any(|path| any(path, true))
        || patterns.iter().any(|pattern| pattern.kind.is_none());
    ask.of(&strict) || ask == Ask::May && is_loose
}

fn is_pattern(pattern: &AuthorizedPath, path: &[u8], is_loose: bool) -> bool {
    let text = |bytes: &[u8]| {
        let text: String = bytes.iter().copied().map(char::from).collect();
        if is_loose {
            text.to_ascii_lowercase()
        } else {
            text
        }
    };
    let path = text(path);
    let without_slash = if is_loose {
        path.trim_end_matches('/')
    } else {
        &path
    };
    match &pattern.kind {
        None => false,
        Some(PathKind::Exact(exact)) if is_loose => {
            text(exact.as_bytes()).trim_end_matches('/') == without_slash
        }
        Some(PathKind::Exact(exact)) => *exact == path,
        Some(PathKind::Prefix(prefix)) => {
            let prefix = text(prefix.trim_end_matches('/').as_bytes());
            format!("{path}/").starts_with(&format!("{prefix}/"))
        }
        Some(PathKind::Suffix(suffix)) => {
            let suffix = text(suffix.as_bytes());
            path.ends_with(&suffix) || without_slash.ends_with(&suffix)
        }
        Some(PathKind::Template(template)) => {
            let template = text(template.as_bytes());
            let mut elements = without_slash.split('/').skip(1);
            for expected in template.split('/').skip(1) {
                match (expected, elements.next()) {
                    ("{**}", _) => return true,
                    ("{*}", Some(element)) if !element.is_empty() => {}
                    (expected, Some(element)) if expected == element => {}
                    _ => return false,
                }
            }
            elements.next().is_none()
        }
    }
}

type Step<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;

fn readings(path: &[u8]) -> Option<BTreeSet<Vec<u8>>> {
    let text = str::from_utf8(path).ok()?;
    let is_encoded = |part: &str| {
        part.len() >= 2
            && part.is_char_boundary(2)
            && u8::from_str_radix(&part[..2], 16).is_ok()
            && !part.starts_with('+')
    };
    let is_valid = text.split('%').skip(1).all(is_encoded);
    if !text.starts_with('/') || text.contains(['?', '#']) || !is_valid {
        return None;
    }
    let decoded = String::from_utf8(decode(path, "")).ok()?;
    if decoded.contains(|character: char| character.is_ascii_control()) {
        return None;
    }
    let mut all = BTreeSet::from([path.to_vec()]);
    let mut apply = |steps: &[Step<'_>]| {
        let next: Vec<_> = steps
            .iter()
            .flat_map(|step| all.iter().map(|path| step(path)).collect::<Vec<_>>())
            .collect();
        all.extend(next);
    };
    apply(&[&slashes]);
    apply(&[&after_host]);
    for round in 0..2 {
        if round == 1 {
            apply(&[&|path| decode(path, ""), &|path| decode(path, "/")]);
            apply(&[&slashes]);
        }
        apply(&[&|path| parameters(path, b'/'), &|path| {
            parameters(path, b'\0')
        }]);
        apply(&[&dots]);
        apply(&[&merge]);
        apply(&[&dots]);
    }
    (all.len() <= 64).then_some(all)
}

fn slashes(path: &[u8]) -> Vec<u8> {
    path.split(|byte| *byte == b'\\')
        .collect::<Vec<_>>()
        .join(&b'/')
}

fn after_host(path: &[u8]) -> Vec<u8> {
    let parts: Vec<_> = path.split(|byte| *byte == b'/').collect();
    match &parts[..] {
        [b"", b"", _host, rest @ ..] => [b"/", &rest.join(&b'/')[..]].concat(),
        _ => path.to_vec(),
    }
}

/// Removes all from a semicolon to an end.
fn parameters(path: &[u8], end: u8) -> Vec<u8> {
    let parts = path.split(|byte| *byte == end);
    let parts = parts.map(|part| part.split(|byte| *byte == b';').next().unwrap());
    parts.collect::<Vec<_>>().join(&end)
}

fn merge(path: &[u8]) -> Vec<u8> {
    let parts: Vec<_> = path.split(|byte| *byte == b'/').collect();
    let last = parts.len() - 1;
    let is_kept = |index: usize, part: &[u8]| index == 0 || index == last || !part.is_empty();
    let kept = parts
        .iter()
        .enumerate()
        .filter(|(index, part)| is_kept(*index, part));
    kept.map(|(_, part)| *part).collect::<Vec<_>>().join(&b'/')
}

fn dots(path: &[u8]) -> Vec<u8> {
    let parts: Vec<_> = path.split(|byte| *byte == b'/').skip(1).collect();
    let mut kept: Vec<&[u8]> = vec![];
    for (index, part) in parts.iter().enumerate() {
        let is_last = index + 1 == parts.len();
        if *part == b".." {
            kept.pop();
        }
        match *part {
            b"." | b".." if is_last => kept.push(b""),
            b"." | b".." => {}
            other => kept.push(other),
        }
    }
    [b"/", &kept.join(&b'/')[..]].concat()
}

fn decode(path: &[u8], kept: &str) -> Vec<u8> {
    let mut parts = path.split(|byte| *byte == b'%');
    let mut output = parts.next().unwrap().to_vec();
    for part in parts {
        let byte = u8::from_str_radix(str::from_utf8(&part[..2]).unwrap(), 16).unwrap();
        if kept.as_bytes().contains(&byte) {
            output.push(b'%');
            output.extend(part);
        } else {
            output.push(byte);
            output.extend(&part[2..]);
        }
    }
    output
}

fn is_host(expected: &[String], ask: Ask, hosts: &[Vec<u8>]) -> bool {
    let mut answers = vec![];
    for host in hosts {
        let host = str::from_utf8(host).unwrap().to_ascii_lowercase();
        let (name, port) = host.rsplit_once(':').unwrap_or((&host, ""));
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_label = |label: &str| {
            !label.is_empty()
                && label
                    .chars()
                    .all(|one| one.is_ascii_alphanumeric() || one == '-')
        };
        if !name.split('.').all(is_label) || port.contains(|one: char| !one.is_ascii_digit()) {
            return ask.unknown();
        }
        let is_expected = |expected: &String| match expected.strip_prefix('*') {
            Some(suffix) => name
                .strip_suffix(suffix)
                .is_some_and(|label| !label.is_empty()),
            None => expected == name,
        };
        answers.push(expected.iter().any(is_expected));
    }
    if hosts.is_empty() {
        ask.unknown()
    } else {
        ask.of(&answers)
    }
}

fn is_field(expected: &AuthorizedField, ask: Ask, fields: &[(Vec<u8>, Vec<u8>)]) -> bool {
    let folded = |name: &[u8]| {
        String::from_utf8_lossy(name)
            .to_lowercase()
            .replace('_', "-")
    };
    let of_name = fields
        .iter()
        .filter(|(name, _)| folded(name) == expected.name);
    let lines: Vec<String> = of_name
        .clone()
        .map(|(_, value)| String::from_utf8_lossy(value).trim().to_owned())
        .collect();
    let is_spelled = of_name.clone().any(|(name, _)| !name.contains(&b'_'));
    let is_value = |value: &str| match &expected.kind {
        Some(FieldKind::Exact(exact)) => value == exact,
        Some(FieldKind::Prefix(prefix)) => value.starts_with(&**prefix),
        Some(FieldKind::Suffix(suffix)) => value.ends_with(&**suffix),
        Some(FieldKind::Present(_)) => true,
        None => false,
    };
    if expected.kind.is_none() {
        return ask.unknown();
    }
    if lines.is_empty() {
        return false;
    }
    let has_comma = match &expected.kind {
        Some(FieldKind::Exact(text) | FieldKind::Prefix(text) | FieldKind::Suffix(text)) => {
            text.contains(',')
        }
        _ => true,
    };
    let mut values = lines.clone();
    values.extend([",", ", ", "; "].map(|separator| lines.join(separator)));
    let members = lines
        .iter()
        .flat_map(|line| line.split(','))
        .map(str::trim)
        .filter(|member| !member.is_empty());
    if !has_comma && (ask == Ask::May || expected.name == "accept") {
        values.extend(members.map(str::to_owned));
    }
    let mut answers: Vec<bool> = values.iter().map(|value| is_value(value)).collect();
    answers.extend((!is_spelled).then_some(false));
    ask.of(&answers)
}

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
            methods: self.some(1, |random| random.one(&["GET", "POST"]).to_owned()),
            paths: self.some(2, Self::pattern),
            hosts: self.some(1, |random| random.one(&["a.b", "*.b", "b"]).to_owned()),
            headers: self.some(1, field),
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
                self.one(&[0, 2])
            } else {
                1
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
                name: format!("p{count}"),
                action: if random.0.u8(..) < 4 {
                    77
                } else {
                    random.one(&[Action::Allow, Action::Deny]).into()
                },
                audit: random.0.u8(..4) == 0,
                ports: random.ports(),
                rules: random.some(3, Self::rule),
            }
        });
        proto::Authorization {
            policies,
            deny_by_default: self.0.u8(..4) == 0,
            default_name: "default".into(),
        }
    }

    fn head(&mut self) -> Head {
        let bytes = |text: &str| text.as_bytes().to_vec();
        Head {
            method: bytes(self.one(&["GET", "GET", "POST", "get"])),
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
            let call = Call {
                identity: identity.as_ref(),
                address: random
                    .one(&["10.0.0.1", "11.0.0.1", "::ffff:10.0.0.1", "fd00::1"])
                    .parse()
                    .unwrap(),
                port: random.one(&[80, 81]),
                request: head.as_ref().map(|head| head as &dyn Request),
            };
            let context = || {
                format!(
                    "{message:?} {:?} {} {} {head:?}",
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

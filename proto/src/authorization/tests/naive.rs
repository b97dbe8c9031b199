//! A second implementation of the verdict, as plain as can be: it makes all readings, and asks in
//! two passes whether a rule may match (DENY) and whether it must (ALLOW).

use std::collections::BTreeSet;

use super::*;
use crate::mesh::v1::authorization_source::Kind as SourceKind;
use crate::mesh::v1::authorized_field::Kind as FieldKind;

/// The question about a rule.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Ask {
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

pub(super) fn judge(
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
    let issuing = policies.iter().filter(|policy| {
        let mut rules = policy.rules.iter();
        let names_port = |rule: &AuthorizationRule| rule.ports.contains(&port);
        !policy.issuers.is_empty()
            && (!policy.ports.is_empty()
                || rules
                    .clone()
                    .any(|rule| rule.ports.is_empty() || names_port(rule))
                || rules.next().is_none())
    });
    let issuing: Vec<&str> = issuing.map(|policy| &*policy.name).collect();
    if let Some(token) = call.token
        && !issuing.is_empty()
        && !token.policies.iter().any(|name| issuing.contains(&&**name))
    {
        return Err(None);
    }
    // The fields of all policies, at whatever port.
    let all = message.policies.iter();
    let set: Vec<&str> = all
        .filter(|policy| audit || !policy.audit)
        .flat_map(|policy| &policy.issuers)
        .flat_map(|issuer| &issuer.fields)
        .map(|field| &*field.name)
        .collect();
    let matches = |policy: &AuthorizationPolicy, rule: &AuthorizationRule, ask| {
        let mut rule = rule.clone();
        for header in rule.requests.iter_mut().flat_map(|one| &mut one.headers) {
            if set.contains(&&*header.name) {
                header.kind = None;
            }
        }
        let token = call.token;
        let token = token.filter(|token| token.policies.contains(&policy.name.as_str().into()));
        matches(&rule, ask, &Call { token, ..*call }, head)
    };
    for policy in &policies {
        if policy.action == 77 {
            return Err(Some((policy.name.clone(), 0)));
        }
        for (index, rule) in policy.rules.iter().enumerate() {
            if policy.action() == Action::Deny && matches(policy, rule, Ask::May) {
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
                .any(|rule| matches(policy, rule, Ask::Must))
        })
    };
    if is_allowed { Ok(()) } else { Err(None) }
}

fn matches(rule: &AuthorizationRule, ask: Ask, call: &Call<'_>, head: Option<&Head>) -> bool {
    if ![1, 2].contains(&rule.revision) {
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
            .any(|request| is_request(request, ask, head) && has_claims(request, ask, call)),
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
        (None | Some(SourceKind::Host(_)), _) | (Some(SourceKind::Identity(_)), None) => {
            ask.unknown()
        }
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

fn has_claims(request: &RequestMatch, ask: Ask, call: &Call<'_>) -> bool {
    request.claims.iter().all(|condition| {
        let (Some(token), Some(kind)) = (call.token, &condition.kind) else {
            return ask.unknown();
        };
        let value = &token.claims[&condition.name];
        let mut values: Vec<String> = match value {
            serde_json::Value::Array(values) => values.iter().map(text).collect(),
            value => text(value).split(' ').map(str::to_owned).collect(),
        };
        if condition.name != "scope" && !value.is_array() {
            values = vec![text(value)];
        }
        match kind {
            FieldKind::Present(_) => !value.is_null(),
            FieldKind::Exact(exact) => values.contains(exact),
            FieldKind::Prefix(prefix) => values.iter().any(|value| value.starts_with(prefix)),
            FieldKind::Suffix(suffix) => values.iter().any(|value| value.ends_with(suffix)),
        }
    })
}

fn text(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => String::new(),
        value => value.to_string().trim_matches('"').to_owned(),
    }
}

fn is_request(request: &RequestMatch, ask: Ask, head: &Head) -> bool {
    let method = String::from_utf8_lossy(&head.method);
    let methods = [method.to_string(), method.to_uppercase()];
    let methods = methods.map(|method| request.methods.contains(&method));
    let may_be_get = ["CONNECT", "HEAD"].contains(&&*method.to_uppercase());
    let is_get = may_be_get && request.methods.contains(&"GET".to_owned());
    (request.methods.is_empty() || ask.of(&methods) || ask == Ask::May && is_get)
        && (request.paths.is_empty() || is_path(&request.paths, ask, &head.path))
        && (request.hosts.is_empty() || is_host(&request.hosts, ask, &head.hosts))
        && request
            .headers
            .iter()
            .all(|field| is_field(field, ask, &head.fields))
}

pub(super) fn is_path(patterns: &[AuthorizedPath], ask: Ask, path: &[u8]) -> bool {
    let Some(readings) = readings(path) else {
        return ask.unknown();
    };
    let matches = |path: &Vec<u8>| {
        let mut patterns = patterns.iter();
        patterns.any(|pattern| is_pattern(pattern, path, false))
    };
    let strict: Vec<bool> = readings.iter().map(matches).collect();
    let decoded: Vec<_> = patterns.iter().map(decoded).collect();
    let may_match = |path: &Vec<u8>| {
        let mut all = patterns.iter().chain(&decoded);
        all.any(|pattern| is_pattern(pattern, path, true))
    };
    let is_loose =
        readings.iter().any(may_match) || patterns.iter().any(|pattern| pattern.kind.is_none());
    ask.of(&strict) || ask == Ask::May && is_loose
}

/// The pattern, decoded but for slashes.
fn decoded(pattern: &AuthorizedPath) -> AuthorizedPath {
    let text = |text: &String| {
        let bytes = decode(text.as_bytes(), "/");
        String::from_utf8(bytes).expect("a pattern of characters")
    };
    let kind = pattern.kind.as_ref().map(|kind| match kind {
        PathKind::Exact(path) => PathKind::Exact(text(path)),
        PathKind::Prefix(path) => PathKind::Prefix(text(path)),
        PathKind::Suffix(path) => PathKind::Suffix(text(path)),
        PathKind::Template(path) => PathKind::Template(text(path)),
    });
    AuthorizedPath { kind }
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
    let hosts: &[Step<'_>] = &[&after_host, &after_url_host, &one_first_slash];
    let decode_both: &[Step<'_>] = &[&|path| decode(path, ""), &|path| decode(path, "/")];
    let parameters: &[Step<'_>] = &[
        &|path| parameters(path, b'/'),
        &|path| parameters(path, b'\0'),
        &last_parameters,
    ];
    for round in 0..2 {
        if round == 1 {
            apply(decode_both);
        }
        apply(&[&slashes]);
        apply(hosts);
        apply(parameters);
        let all_dots: [Step<'_>; 4] = [&dots, &java_dots, &url_dots, &dots_before_parameters];
        apply(&all_dots[..if round == 0 { 4 } else { 1 }]);
        apply(&[&merge]);
        apply(&all_dots[..2 - round]);
        apply(hosts);
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

fn after_url_host(path: &[u8]) -> Vec<u8> {
    let text = one_first_slash(path);
    if path.starts_with(b"//") && text.len() > 1 {
        after_host(&[b"/", &text[..]].concat())
    } else {
        path.to_vec()
    }
}

fn one_first_slash(path: &[u8]) -> Vec<u8> {
    let rest = path.iter().skip_while(|byte| **byte == b'/').copied();
    std::iter::once(b'/').chain(rest).collect()
}

fn last_parameters(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<_> = path.split(|byte| *byte == b'/').collect();
    let last = parts.pop().unwrap();
    parts.push(last.split(|byte| *byte == b';').next().unwrap());
    parts.join(&b'/')
}

fn dots_before_parameters(path: &[u8]) -> Vec<u8> {
    let before = last_parameters(path);
    [&dots(&before), &path[before.len()..]].concat()
}

/// ".." stays where nothing precedes it.
fn java_dots(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<_> = path.split(|byte| *byte == b'/').skip(1).collect();
    let is_dots = matches!(parts.last(), Some(&b"." | &b".."));
    parts.retain(|part| *part != b".");
    let is_pair = |pair: &[&[u8]]| pair[0] != b".." && pair[1] == b"..";
    while let Some(at) = parts.windows(2).position(is_pair) {
        parts.drain(at..at + 2);
    }
    if is_dots {
        parts.push(b"");
    }
    [b"/", &parts.join(&b'/')[..]].concat()
}

/// Encoded dots count as dots in elements of dots only.
fn url_dots(path: &[u8]) -> Vec<u8> {
    let parts = path.split(|byte| *byte == b'/').map(|part| {
        let text = String::from_utf8_lossy(part).to_lowercase();
        let plain = text.replace("%2e", ".");
        if [".", ".."].contains(&&*plain) {
            plain.into_bytes()
        } else {
            part.to_vec()
        }
    });
    dots(&parts.collect::<Vec<_>>().join(&b'/'))
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

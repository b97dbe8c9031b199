//! Conditions on the method, the host and the header fields of a request.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use super::Request;
use super::paths::check_length;
use super::rule::Facts;
use super::truth::{Tally, Truth};
use crate::field;
use crate::mesh::v1 as proto;
use crate::mesh::v1::authorized_field::Kind;
use crate::policy::{Violation, check_name, violation};

/// Fields of requests that are lists (RFC 9110 and the registry of fields), and `X-Forwarded-For`.
const LISTS: &str = "accept accept-charset accept-encoding accept-language \
    access-control-request-headers cache-control cdn-loop content-encoding content-language \
    forwarded if-match if-none-match link pragma prefer via warning x-forwarded-for";
/// The values of fields that all conditions on a request may judge, each counted for each condition.
const MAX_JUDGED_VALUES: usize = 64 * 1024;
/// How servers join several lines of a field.
const SEPARATORS: [&[u8]; 3] = [b",", b", ", b"; "];

/// A host: a name, or with "*." a name after one label or more.
#[derive(Debug)]
pub(super) struct HostPattern {
    name: Box<[u8]>,
    is_wildcard: bool,
}

/// A condition on a header field.
#[derive(Debug)]
pub(super) struct FieldCondition {
    name: Box<str>,
    value: Text,
    is_list: bool,
    /// The name as servers may read it.
    folded: Box<[u8]>,
}

/// A condition on a text.
#[derive(Debug)]
pub(super) enum Text {
    Present,
    Exact(Box<[u8]>),
    Prefix(Box<[u8]>),
    Suffix(Box<[u8]>),
}

/// The truth of a list of methods, for the method as it is sent and in upper case. It is unknown rather
/// than false if the method may be read as one of the list, or, with `reads_head`, if servers answer it
/// as GET.
pub(super) fn judge_method(methods: &[Box<[u8]>], method: &[u8], reads_head: bool) -> Truth {
    if methods.is_empty() {
        return Truth::True;
    }
    let upper = || method.iter().map(u8::to_ascii_uppercase);
    let mut tally = Tally::default();
    tally.add(methods.iter().any(|one| **one == *method));
    tally.add(methods.iter().any(|one| one.iter().copied().eq(upper())));
    let is_head = reads_head && method.eq_ignore_ascii_case(b"HEAD");
    tally.matched |= (may_be_get(method) || is_head) && methods.iter().any(|one| **one == *b"GET");
    tally.truth()
}

/// Whether a request may be one of GET, too: CONNECT opens a WebSocket over HTTP/2, as GET does over
/// HTTP/1.1 (RFC 8441, section 5).
pub fn may_be_get(method: &[u8]) -> bool {
    method.eq_ignore_ascii_case(b"CONNECT")
}

/// The truth of a list of hosts, for each host of the request. A host that is not known is None.
pub(super) fn judge_hosts(hosts: &[Option<HostPattern>], request: &dyn Request) -> Truth {
    if hosts.is_empty() {
        return Truth::True;
    }
    let mut tally = Tally::default();
    request.hosts(&mut |host| match host_name(host) {
        Some(name) => {
            let mut known = hosts.iter().flatten();
            tally.add(known.any(|host| host.matches(name)));
        }
        // Servers may read any name.
        None => tally = Tally::UNKNOWN,
    });
    tally.matched |= tally.missed && hosts.iter().any(Option::is_none);
    tally.truth()
}

/// The truth of all conditions on fields.
pub(super) fn judge_fields(conditions: &[Option<FieldCondition>], facts: &Facts<'_>) -> Truth {
    !Truth::any_known(conditions, |condition| {
        facts
            .fields()
            .map_or(Truth::Unknown, |fields| !condition.truth(fields))
    })
}

/// The name, or the address, in a host with an optional port, without a dot at its end.
pub fn host_name(host: &[u8]) -> Option<&[u8]> {
    let colon = host.iter().rposition(|byte| *byte == b':');
    let is_port = |port: &[u8]| port.iter().all(u8::is_ascii_digit);
    let name = match (colon, host.last()) {
        (Some(colon), last) if last != Some(&b']') => {
            if !is_port(&host[colon + 1..]) {
                return None;
            }
            &host[..colon]
        }
        _ => host,
    };
    let address = name
        .strip_prefix(b"[")
        .and_then(|rest| rest.strip_suffix(b"]"));
    if let Some(address) = address {
        let is_address = |byte: &u8| byte.is_ascii_hexdigit() || b":.".contains(byte);
        return address.iter().all(is_address).then_some(name);
    }
    let name = name.strip_suffix(b".").unwrap_or(name);
    is_name(name).then_some(name)
}

pub(super) fn is_name(name: &[u8]) -> bool {
    let is_character = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    let mut labels = name.split(|byte| *byte == b'.');
    labels.all(|label| !label.is_empty() && label.iter().all(is_character))
}

impl HostPattern {
    pub(super) fn parse(text: &str) -> Result<HostPattern, Violation> {
        let rest = text.strip_prefix("*.");
        let name = rest.unwrap_or(text);
        if !is_name(name.as_bytes()) {
            let expected = "a name such as api.example.com or *.example.com, without port";
            return Err(violation("", text, expected));
        }
        check_length("", text)?;
        Ok(HostPattern {
            name: name.as_bytes().into(),
            is_wildcard: rest.is_some(),
        })
    }

    pub(super) fn matches(&self, host: &[u8]) -> bool {
        let Some(start) = host.len().checked_sub(self.name.len()) else {
            return false;
        };
        let (labels, name) = host.split_at(start);
        let is_before = if self.is_wildcard {
            labels.ends_with(b".")
        } else {
            labels.is_empty()
        };
        is_before && name.eq_ignore_ascii_case(&self.name)
    }
}

impl FieldCondition {
    pub(super) fn parse(message: &proto::AuthorizedField) -> Result<FieldCondition, Violation> {
        let name = &*message.name;
        if field::is_reserved(name) {
            let expected = "a header that clients set";
            return Err(violation("name", name, expected));
        }
        check_name("name", name)?;
        Ok(FieldCondition {
            name: name.into(),
            folded: field::folded(name.as_bytes()).collect(),
            is_list: LISTS.split(' ').any(|list| list.eq_ignore_ascii_case(name)),
            value: Text::parse("value", message)?,
        })
    }

    /// Whether it is about one of these fields.
    pub(super) fn is_any(&self, names: &[&str]) -> bool {
        let own = self.name.as_bytes();
        names
            .iter()
            .any(|name| field::is_same_name(name.as_bytes(), own))
    }

    /// The truth for each line, for all joined, and for their members. A field with another spelling
    /// of the name may also be none. Unknown if too much has been judged before.
    fn truth(&self, fields: &Fields) -> Truth {
        let Some(field) = fields.field(&self.folded) else {
            return Truth::False;
        };
        if !fields.charge(field) {
            return Truth::Unknown;
        }
        let mut tally = Tally::default();
        for value in &field.values {
            tally.add(self.value.matches(value));
        }
        if !self.value.has_comma() {
            for member in &field.members {
                let matches = self.value.matches(member);
                // Servers divide other fields as well, but none has to.
                tally.matched |= matches;
                tally.missed |= self.is_list && !matches;
            }
        }
        let name = self.name.as_bytes();
        let mut spellings = field.spellings.iter();
        if !spellings.any(|spelling| spelling.eq_ignore_ascii_case(name)) {
            tally.add(false);
        }
        tally.truth()
    }
}

/// The fields of a request, each name once, for all conditions.
#[derive(Debug, Default)]
pub(super) struct Fields {
    by_name: BTreeMap<Vec<u8>, Field>,
    judged: Cell<usize>,
}

/// The lines of one name, in all its spellings.
#[derive(Debug, Default)]
struct Field {
    lines: Vec<Vec<u8>>,
    spellings: BTreeSet<Vec<u8>>,
    /// The lines, and all of them joined.
    values: BTreeSet<Vec<u8>>,
    /// The members of those lines that are lists.
    members: BTreeSet<Vec<u8>>,
}

impl Fields {
    pub(super) fn of(request: &dyn Request) -> Self {
        let mut by_name: BTreeMap<Vec<u8>, Field> = BTreeMap::new();
        request.fields(&mut |name, value| {
            let field = by_name.entry(field::folded(name).collect()).or_default();
            field.spellings.insert(name.to_ascii_lowercase());
            field.lines.push(value.trim_ascii().to_vec());
        });
        for field in by_name.values_mut() {
            field.read();
        }
        Self {
            by_name,
            judged: Cell::default(),
        }
    }

    fn field(&self, folded: &[u8]) -> Option<&Field> {
        self.by_name.get(folded)
    }

    /// Counts the values of a field. False if conditions have judged too many.
    fn charge(&self, field: &Field) -> bool {
        let values = field.values.len() + field.members.len() + field.spellings.len();
        self.judged.set(self.judged.get().saturating_add(values));
        self.judged.get() <= MAX_JUDGED_VALUES
    }
}

impl Field {
    /// Reads the lines as servers do.
    fn read(&mut self) {
        for line in self.lines.iter().filter(|line| line.contains(&b',')) {
            let members = line.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            let members = members.filter(|member| !member.is_empty());
            self.members.extend(members.map(<[u8]>::to_vec));
        }
        if self.lines.len() > 1 {
            let joined = SEPARATORS.map(|separator| self.lines.join(separator));
            self.values.extend(joined);
        }
        self.values.append(&mut self.lines.drain(..).collect());
    }
}

impl Text {
    /// Parses the value of a message. `field` names it in errors.
    pub(super) fn parse(
        field: &'static str,
        message: &proto::AuthorizedField,
    ) -> Result<Text, Violation> {
        let bytes = |text: &str| {
            check_length(field, text)?;
            let is_invalid = |character: char| character.is_ascii_control();
            if text.trim() != text || text.contains(is_invalid) {
                let expected = "without control characters, and spaces around it";
                return Err(violation(field, text, expected));
            }
            Ok(text.as_bytes().into())
        };
        match &message.kind {
            Some(Kind::Exact(text)) => bytes(text).map(Text::Exact),
            Some(Kind::Prefix(text)) => bytes(text).map(Text::Prefix),
            Some(Kind::Suffix(text)) => bytes(text).map(Text::Suffix),
            Some(Kind::Present(_)) => Ok(Text::Present),
            None => {
                let expected = "one of exact, prefix, suffix and present";
                Err(violation(field, &message.name, expected))
            }
        }
    }

    /// Whether every value matches.
    pub(super) fn is_any(&self) -> bool {
        matches!(self, Text::Present)
    }

    /// Whether no member of a list may have the value.
    fn has_comma(&self) -> bool {
        match self {
            Text::Present => true,
            Text::Exact(text) | Text::Prefix(text) | Text::Suffix(text) => text.contains(&b','),
        }
    }

    pub(super) fn matches(&self, value: &[u8]) -> bool {
        match self {
            Text::Present => true,
            Text::Exact(exact) => value == &**exact,
            Text::Prefix(prefix) => value.starts_with(prefix),
            Text::Suffix(suffix) => value.ends_with(suffix),
        }
    }
}

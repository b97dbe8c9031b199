//! Changes that the proxy makes to a head on its way: an overlay, which both versions of HTTP apply
//! when they write the head. In HTTP/1 the other fields keep their case and order.

use diy_mesh_http2::Fields;
use diy_mesh_proto::field::{CALLED_BY, OF_REQUESTS, OF_RESPONSES, is_same_name};
use http::header::HOST;
use http::{HeaderName, HeaderValue};

use super::credentials::PolicyField;
use super::fields::FieldEdit;
use super::trace_context::TRACEPARENT;
use super::view::{self, Head};

const X_CALLED_BY: HeaderName = HeaderName::from_static(CALLED_BY);

/// A field that only the mesh may set: it has this value alone, or is removed. Names are compared by
/// [`is_same_name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshField<'a>(pub &'a str, pub Option<&'a HeaderValue>);

/// The changes of a request's trailers: only the mesh sets these fields, and never there.
pub const REQUEST_TRAILER_EDITS: [MeshField<'static>; OF_REQUESTS.len()] = removed(OF_REQUESTS);
const RESPONSE_EDITS: [MeshField<'static>; OF_RESPONSES.len()] = removed(OF_RESPONSES);

const fn removed<const N: usize>(names: [&'static str; N]) -> [MeshField<'static>; N] {
    let mut fields = [MeshField("", None); N];
    let mut index = 0;
    while index < N {
        fields[index] = MeshField(names[index], None);
        index += 1;
    }
    fields
}

/// The changes of a response's head and trailers: only a peer's proxy, which has authenticated,
/// replies for the mesh.
pub fn response_edits(from_proxy: bool) -> &'static [MeshField<'static>] {
    if from_proxy { &[] } else { &RESPONSE_EDITS }
}

/// The changes of one head. Fields that are set or added stand last.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edits<'a> {
    /// The fields of the mesh.
    pub own: &'a [MeshField<'a>],
    /// The fields of policies, which only the mesh may set, too.
    pub policy: &'a [PolicyField],
    /// The span that the request comes from, in place of the client's span.
    pub trace: Option<&'a HeaderValue>,
    /// The changes of a route, in order.
    pub route: [&'a [FieldEdit]; 3],
    /// The new host, in the place of the old one.
    pub host: Option<&'a str>,
    /// The new target.
    pub target: Option<&'a [u8]>,
}

/// A head with its changes, for what is judged before they are made.
pub struct Edited<'a> {
    /// As it was sent.
    pub head: &'a dyn Head,
    /// The changes.
    pub edits: Edits<'a>,
}

impl view::Fields for Edited<'_> {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.head.visit(&mut |name, value| {
            if let Some(value) = self.edits.value(name, value) {
                each(name, value);
            }
        });
        let appended = self.edits.appended();
        appended.for_each(|(name, value)| each(name, value));
    }
}

impl Head for Edited<'_> {
    fn authority(&self) -> Option<&[u8]> {
        self.head.authority()
    }
}

impl<'a> Edits<'a> {
    /// Changes of the mesh only.
    pub fn of(own: &'a [MeshField<'a>]) -> Self {
        Self {
            own,
            ..Self::default()
        }
    }

    fn own(&self) -> impl Iterator<Item = MeshField<'a>> + use<'a> {
        let fields = self.policy.iter();
        let fields = fields.map(|PolicyField(name, value)| MeshField(name, value.as_ref()));
        let trace = self.trace.map(|value| MeshField(TRACEPARENT, Some(value)));
        self.own.iter().copied().chain(fields).chain(trace)
    }

    fn route(&self) -> impl Iterator<Item = &'a FieldEdit> + use<'a> {
        self.route.into_iter().flatten()
    }

    /// The new value of a field that stands in the head, or `None` if it is left out.
    pub fn value<'f>(&self, name: &[u8], value: &'f [u8]) -> Option<&'f [u8]>
    where
        'a: 'f,
    {
        match self.host {
            _ if self.removes(name) => None,
            Some(host) if name.eq_ignore_ascii_case(b"host") => Some(host.as_bytes()),
            _ => Some(value),
        }
    }

    fn removes(&self, name: &[u8]) -> bool {
        let is = |own: &str| is_same_name(name, own.as_bytes());
        self.own.iter().any(|MeshField(own, _)| is(own))
            || self.policy.iter().any(|PolicyField(own, _)| is(own))
            || self.trace.is_some() && is(TRACEPARENT)
            || self.route().any(|edit| edit.removes(name))
    }

    /// The fields that are appended.
    pub fn appended(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        let own = self.own();
        let own =
            own.filter_map(|MeshField(name, value)| Some((name.as_bytes(), value?.as_bytes())));
        let route = self.route().filter_map(FieldEdit::appended);
        own.chain(route.map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    /// The fields of a head after the changes.
    pub fn fields<'f>(
        self,
        head: impl Iterator<Item = (&'f [u8], &'f [u8])>,
    ) -> impl Iterator<Item = (&'f [u8], &'f [u8])>
    where
        'a: 'f,
    {
        head.filter_map(move |(name, value)| Some((name, self.value(name, value)?)))
            .chain(self.appended())
    }

    /// Changes the fields of a head of HTTP/2.
    pub fn apply(&self, fields: &mut Fields) {
        fields.retain(|name| !self.removes(name));
        if let Some(host) = self.host.and_then(|host| HeaderValue::from_str(host).ok()) {
            fields.replace(HOST.as_str(), &host);
        }
        for MeshField(name, value) in self.own() {
            let Some(value) = value else { continue };
            // Not copied: each request gets it.
            let name = if name.eq_ignore_ascii_case(CALLED_BY) {
                Ok(X_CALLED_BY)
            } else {
                HeaderName::from_bytes(name.as_bytes())
            };
            if let Ok(name) = name {
                fields.push(&name, value);
            }
        }
        for (name, value) in self.route().filter_map(FieldEdit::appended) {
            let name = HeaderName::from_bytes(name.as_bytes());
            if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(value)) {
                fields.push(&name, &value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diy_mesh_proto::field::MESH_ERROR;

    fn route() -> [FieldEdit; 2] {
        [
            FieldEdit::Add("X-Via".into(), "mesh".into()),
            FieldEdit::Remove("x-mesh-error".into()),
        ]
    }

    fn edits<'a>(own: &'a [MeshField<'a>], route: &'a [FieldEdit]) -> Edits<'a> {
        Edits {
            route: [route, &[], &[]],
            ..Edits::of(own)
        }
    }

    #[test]
    fn edits_keep_the_case_and_order_of_other_fields() {
        let head: [(&[u8], &[u8]); 5] = [
            (b"hOsT", b"a"),
            (b"x_called.by", b"forged"),
            (b"X-Via", b"one"),
            (b"X-MESH-ERROR", b"forged"),
            (b"X-B", b"2"),
        ];
        let caller = HeaderValue::from_static("me");
        let (own, route) = ([MeshField("X-Called-By", Some(&caller))], route());
        let edited: Vec<_> = edits(&own, &route).fields(head.into_iter()).collect();
        let expected: [(&[u8], &[u8]); 5] = [
            (b"hOsT", b"a"),
            (b"X-Via", b"one"),
            (b"X-B", b"2"),
            (b"X-Called-By", b"me"),
            (b"X-Via", b"mesh"),
        ];
        assert_eq!(edited, expected);
    }

    #[test]
    fn edits_apply_to_a_header_map() {
        let mut headers = Fields::default();
        for (name, value) in [("x_called.by", "forged"), ("x-via", "one"), ("x-b", "2")] {
            headers.push(
                &HeaderName::from_static(name),
                &HeaderValue::from_static(value),
            );
        }
        let caller = HeaderValue::from_static("me");
        let own = [MeshField("X-Called-By", Some(&caller))];
        edits(&own, &route()).apply(&mut headers);
        let values = |name: &str| -> Vec<_> { headers.get_all(name).collect() };
        assert_eq!(values("x-via"), [&b"one"[..], b"mesh"]);
        assert_eq!(values("x-called-by"), [b"me"]);
        assert_eq!(values("x-b"), [b"2"]);
        assert_eq!(headers.len(), 4);
    }

    #[test]
    fn called_by_is_recognized_in_every_spelling() {
        let is_removed = |own: &str, name: &str| {
            let edits = [MeshField(own, None)];
            Edits::of(&edits).value(name.as_bytes(), b"").is_none()
        };
        for name in [
            "X-Called-By",
            "x-called-by",
            "X_CALLED_BY",
            "x-Called_by",
            "X.Called.By",
            "x!called~by",
        ] {
            assert!(is_removed(CALLED_BY, name), "{name}");
        }
        for name in [
            "X-Called-Bye",
            "X-Called",
            "XXCalled-By",
            "X-Called-B-",
            "X--Called-By",
        ] {
            assert!(!is_removed(CALLED_BY, name), "{name}");
        }
        assert!(is_removed(MESH_ERROR, "X.Mesh_Error") && !is_removed(MESH_ERROR, "x-mesh-errors"));
    }
}

//! Requests for tests of what depends on their heads.

use std::sync::LazyLock;

use super::*;

/// A request without fields.
pub(crate) fn request<'a>(method: &'a str, target: &'a str) -> RequestView<'a> {
    static EMPTY: LazyLock<Request> =
        LazyLock::new(|| Request::from(&http::Request::new(()).into_parts().0));
    RequestView {
        method: method.as_bytes(),
        target: target.as_bytes(),
        head: &*EMPTY,
        version: Version::HTTP_11,
        upgrade: false,
    }
}

//! The limits of header and trailer sections, for both versions of HTTP.

/// The maximum size of a section. HTTP/1 counts the bytes of a head with its start line, HTTP/2 as in
/// RFC 9113, section 6.5.2.
pub const MAX_SECTION: usize = 64 * 1024;
/// The maximum number of fields of a request, and of an HTTP/1 response.
pub const MAX_FIELDS: usize = 128;

/// The limit that a section exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooLarge {
    /// [`MAX_SECTION`], by a head.
    Header,
    /// [`MAX_FIELDS`].
    Fields,
    /// [`MAX_SECTION`], by trailers.
    Trailers,
}

impl TooLarge {
    /// The limit in a message.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Header => "the header section is over 65536 bytes",
            Self::Fields => "the header section has over 128 fields",
            Self::Trailers => "the trailer section is over 65536 bytes",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_limits() {
        let names = |limit: TooLarge, number: usize| limit.message().contains(&number.to_string());
        assert!(names(TooLarge::Header, MAX_SECTION) && names(TooLarge::Trailers, MAX_SECTION));
        assert!(names(TooLarge::Fields, MAX_FIELDS));
    }
}

//! Error codes (RFC 9113, section 7), and how streams and connections end early.

use std::fmt;
use std::io;

/// An error code. Peers may send codes that have no name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ErrorCode(pub u32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        impl ErrorCode {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// The end of a connection without an error, or of a stream whose rest is not needed.
    NO_ERROR = 0,
    /// A violation without a code of its own.
    PROTOCOL_ERROR = 1,
    /// A failure of the sender.
    INTERNAL_ERROR = 2,
    /// A violation of flow control.
    FLOW_CONTROL_ERROR = 3,
    /// SETTINGS without an acknowledgment.
    SETTINGS_TIMEOUT = 4,
    /// A frame after the end of its stream.
    STREAM_CLOSED = 5,
    /// A frame of a wrong size.
    FRAME_SIZE_ERROR = 6,
    /// A stream that was not processed.
    REFUSED_STREAM = 7,
    /// A stream that is not needed any more.
    CANCEL = 8,
    /// A field block that cannot be decoded.
    COMPRESSION_ERROR = 9,
    /// A failure of the connection of a CONNECT request.
    CONNECT_ERROR = 10,
    /// Too much load.
    ENHANCE_YOUR_CALM = 11,
    /// Transport security below the requirements.
    INADEQUATE_SECURITY = 12,
    /// A request that requires HTTP/1.1.
    HTTP_1_1_REQUIRED = 13,
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{:#x}", self.0),
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a stream, or all streams of a connection, ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The peer reset the stream.
    Reset(ErrorCode),
    /// The peer has closed the connection, and has not processed the stream.
    GoAway(ErrorCode),
    /// The peer has violated the protocol: this side reset the stream, or closed the connection.
    Violation(Violation),
    /// The connection has failed.
    Io(io::ErrorKind),
    /// The connection has ended.
    Closed,
}

/// A violation by a peer, and the code for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The code of the RST_STREAM or GOAWAY frame.
    pub code: ErrorCode,
    /// A description of the violation.
    pub what: &'static str,
}

impl Violation {
    pub(crate) const fn new(code: ErrorCode, what: &'static str) -> Self {
        Self { code, what }
    }

    pub(crate) const fn protocol(what: &'static str) -> Self {
        Self::new(ErrorCode::PROTOCOL_ERROR, what)
    }
}

impl Error {
    /// The code that the peer has sent or gets, if there is one.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Reset(code) | Self::GoAway(code) => Some(*code),
            Self::Violation(violation) => Some(violation.code),
            Self::Io(_) | Self::Closed => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset(code) => write!(f, "the peer reset the stream: {code}"),
            Self::GoAway(code) => write!(f, "the peer closed the connection: {code}"),
            Self::Violation(Violation { code, what }) => write!(f, "{what}: {code}"),
            Self::Io(kind) => write!(f, "{kind}"),
            Self::Closed => f.write_str("the connection has ended"),
        }
    }
}

impl std::error::Error for Error {}

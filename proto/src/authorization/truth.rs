//! Three-valued truth, for conditions on calls of which not everything is known.

/// Kleene's logic: the conjunction is the minimum, the disjunction the maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Truth {
    False,
    Unknown,
    True,
}

impl Truth {
    /// The disjunction of conditions. An unknown condition is `None`. Without conditions: false.
    pub(super) fn any_known<T>(conditions: &[Option<T>], truth: impl Fn(&T) -> Truth) -> Truth {
        let mut result = Truth::False;
        for condition in conditions {
            result = result.max(condition.as_ref().map_or(Truth::Unknown, &truth));
            if result == Truth::True {
                break;
            }
        }
        result
    }
}

impl From<bool> for Truth {
    fn from(value: bool) -> Truth {
        if value { Truth::True } else { Truth::False }
    }
}

impl std::ops::Not for Truth {
    type Output = Truth;

    fn not(self) -> Truth {
        match self {
            Truth::False => Truth::True,
            Truth::Unknown => Truth::Unknown,
            Truth::True => Truth::False,
        }
    }
}

/// The readings of a value that match a condition, and those that do not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) matched: bool,
    pub(super) missed: bool,
}

impl Tally {
    /// A value that may be read as anything.
    pub(super) const UNKNOWN: Tally = Tally {
        matched: true,
        missed: true,
    };

    pub(super) fn add(&mut self, matches: bool) {
        self.matched |= matches;
        self.missed |= !matches;
    }

    /// True if all readings match, false if none does. Unknown if some do, and without readings.
    pub(super) fn truth(self) -> Truth {
        if self.matched == self.missed {
            Truth::Unknown
        } else {
            self.matched.into()
        }
    }
}

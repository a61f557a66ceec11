//! The fencing token of a claim.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::message::MessageId;

/// The right to settle one claim, as a value that can be written down: `ID.TOKEN`, or `ID.TOKEN-EPOCH` from epoch 2 on.
///
/// Every successful claim of a message issues a new token, and only the newest settles. The epoch grows when the machine has
/// been restarted and in every backup, so that a token which was lost with the power is never issued twice.
///
/// ```
/// use relet::Receipt;
///
/// let receipt: Receipt = "40.3-2".parse()?;
/// assert_eq!(receipt.id().get(), 40);
/// assert_eq!(receipt.to_string(), "40.3-2");
/// assert!("40".parse::<Receipt>().is_err());
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Receipt {
    id: MessageId,
    token: i64,
    epoch: i64,
}

impl Receipt {
    pub(crate) fn new(id: MessageId, token: i64, epoch: i64) -> Receipt {
        Receipt { id, token, epoch }
    }

    /// The message that was claimed.
    pub fn id(&self) -> MessageId {
        self.id
    }

    /// How many receipts this message has had, this one included.
    pub fn token(&self) -> i64 {
        self.token
    }

    /// The store's epoch when it was issued.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.epoch {
            1 => write!(f, "{}.{}", self.id, self.token),
            epoch => write!(f, "{}.{}-{epoch}", self.id, self.token),
        }
    }
}

impl FromStr for Receipt {
    type Err = Error;

    fn from_str(text: &str) -> Result<Receipt> {
        let wrong = || Error::Parse {
            what: "receipt",
            value: text.chars().take(64).collect(),
            expected: "a receipt is ID.TOKEN or ID.TOKEN-EPOCH, as a claim printed it",
        };
        // Digits only: `str::parse` would also take a sign.
        let number = |part: &str| match part.bytes().all(|b| b.is_ascii_digit()) {
            true => part.parse::<i64>().ok().filter(|n| *n > 0).ok_or_else(wrong),
            false => Err(wrong()),
        };
        let (id, rest) = text.split_once('.').ok_or_else(wrong)?;
        let (token, epoch) = match rest.split_once('-') {
            Some((token, epoch)) => (token, number(epoch)?),
            None => (rest, 1),
        };
        Ok(Receipt::new(MessageId::new(number(id)?), number(token)?, epoch))
    }
}

impl Serialize for Receipt {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Receipt {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Receipt, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_receipt_is_refused() {
        for text in [
            "",
            ".",
            "1",
            "1.",
            ".1",
            "1.2-",
            "1.2.3",
            "0.1",
            "1.0",
            "1.1-0",
            "-1.2",
            "+1.2",
            "1.2-+2",
            "9223372036854775808.1",
            "1 .2",
        ] {
            assert!(text.parse::<Receipt>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn it_reads_back_what_it_wrote() {
        for epoch in [1, 2, 40] {
            let receipt = Receipt::new(MessageId::new(7), 3, epoch);
            assert_eq!(receipt.to_string().parse::<Receipt>().unwrap(), receipt);
        }
    }
}

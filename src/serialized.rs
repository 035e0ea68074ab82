//! A key as a text, for the feature `serde`. A text that is no key is refused.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::key::Key;

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;
    use crate::{
        key::{Claim, Holder, Token},
        rules::{LockState, Reason, Rules, Status},
    };

    #[test]
    fn a_claim_is_read_as_it_was_written() {
        let claim = Claim { key: Key::new("report").unwrap(), holder: Holder::unique(), token: Token::new(7) };
        let written = to_value(&claim).unwrap();
        assert_eq!(written, json!({ "key": "report", "holder": claim.holder.to_string(), "token": 7 }));
        assert_eq!(from_value::<Claim>(written).unwrap(), claim);
    }

    #[test]
    fn a_text_that_is_no_key_is_refused() {
        let refused = from_value::<Key>(json!(" report")).unwrap_err().to_string();
        assert!(refused.contains("white space"), "{refused}");
    }

    #[test]
    fn states_are_written_by_their_names() {
        for reason in
            [Reason::HeldByAnotherProgram, Reason::TimedOutUnfinished, Reason::WithinMinInterval, Reason::Busy]
        {
            assert_eq!(to_value(reason).unwrap(), json!(reason.name()));
        }
        for state in [LockState::HeldByAnotherProgram, LockState::Expired, LockState::Free] {
            assert_eq!(to_value(state).unwrap(), json!(state.name()));
        }
        assert_eq!(from_value::<Rules>(json!("article")).unwrap(), Rules::Article);
        assert_eq!(from_value::<Status>(json!("failed")).unwrap(), Status::Failed);
    }
}
